"""Runs this host under `querl-conformance --host`: one JSON object per line on stdin and stdout (docs/spec/host-protocol.md)."""

import json, sys
from querl_host import Fault, Plugin


def reply(request):
    global plugin
    match request["op"]:
        case "load":
            plugin = Plugin(request["component"], request.get("settings"), request.get("limits"))
            return {"contract": plugin.contract}
        case "describe": return {"range": dict(zip(("min", "max"), plugin.range)) if plugin.reward else None, **plugin.description}
        case "score": return plugin.score(request["episodes"], request.get("calls"))
        case "filter": return plugin.filter(request["samples"], request.get("calls"))
        case "prompt": return plugin.messages(request["task"], request["input"])
        case "parse_rewrite": return plugin.parse_rewrite(request["text"])
        case "parse_judgement": return plugin.parse_judgement(request["text"])
        case "style": return plugin.style(request["dialogues"], request.get("calls"))
        case "end": sys.exit(print('{"ok":null}', flush=True))


for line in sys.stdin:
    try:
        answer = {"ok": reply(json.loads(line))}
    except Fault as fault:
        answer = {"fault": {"kind": fault.kind, "message": str(fault)}}
    print(json.dumps(answer, ensure_ascii=False), flush=True)
