"""A host for querl plugins of contract 0.1 and 0.2 on the package `wasmtime` 50.x: `Plugin(path, settings, limits).score(episodes)`.

docs/spec/ is the specification. Arguments and results are in the JSON form of the contract.
"""

import json, random, re, struct, threading, time
from decimal import Decimal
from functools import lru_cache
from values import lift, lower, pack, shape, unpack
from wasmtime import Config, Engine, Store, WasmtimeError
from wasmtime import component as c

LIMITS = {"fuel_per_call": 2_000_000_000, "fuel_per_item": 100_000_000, "timeout_ms": 10_000, "memory_bytes": 256 << 20,
          "output_bytes": 8 << 20, "host_calls_per_item": 64}
MAX_COMPONENT_BYTES, MAX_RANDOM_BYTES, MAX_STDERR_BYTES, TICK_MS = 64 << 20, 64 << 10, 64 << 10, 10
KINDS = {"prompts": "prompt", "filters": "filter", "rewards": "reward", "group-rewards": "group_reward", "style-scores": "style_scorer"}
INPUTS_0_1 = [{"input": name, "required": name in ("baseline", "retrieval")} for name in ("baseline", "retrieval", "judgement", "style")]
FUNCTIONS = {"tokens.count": "count_tokens", "tokens.split": "split_tokens", "words.segment": "segment_words",
             "similarity.embed": "embed", "judge.ask": "ask_judge", "style-model.classify": "classify_style"}
NOT_RECORDED = {"failed": {"kind": "not_recorded", "message": "the recording has no result for this call"}}


class Fault(Exception):
    """A violation of the contract or of a limit by a plugin. `kind` is load, settings, trap, limit or result."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind


def nothing(ty):
    """The default result of a WASI function, by type: an empty list, none, 0, ok, or a handle without function."""
    match ty:
        case c.ListType(): return []
        case c.OwnType(): return c.ResourceHost.own(0, 0)
        case c.ResultType(): return c.Variant("ok") if ty._tagged() else nothing(ty.ok)
        case c.RecordType(): return lower(shape(ty), {})
        case c.Bool(): return True
    return None if ty is None or isinstance(ty, c.OptionType) else 0


def tick():
    while True:
        time.sleep(TICK_MS / 1000)
        ENGINE.increment_epoch()


CONFIG = Config()
CONFIG.consume_fuel = CONFIG.epoch_interruption = CONFIG.cranelift_nan_canonicalization = CONFIG.wasm_relaxed_simd_deterministic = True
CONFIG.wasm_threads = CONFIG.wasm_memory64 = False
ENGINE = Engine(CONFIG)
threading.Thread(target=tick, daemon=True).start()
compiled = lru_cache(maxsize=16)(lambda component: c.Component(ENGINE, component))


class Plugin:
    """A component with its settings. Each call runs in a new instance. Not thread-safe."""

    def __init__(self, path, settings=None, limits=None):
        self.title, self.settings, self.limits, self.range = str(path), {}, {**LIMITS, **(limits or {})}, (0.0, 1.0)
        self.names, self.codes, self.recorded, self.functions = set(), set(), [], set()
        with open(path, "rb") as file:
            data = file.read(MAX_COMPONENT_BYTES + 1)
        self.demand(len(data) <= MAX_COMPONENT_BYTES, f"has more than {MAX_COMPONENT_BYTES} bytes", "load")
        try:
            self.component, self.linker = compiled(data), c.Linker(ENGINE)
            ty = self.component.type
            self.exports = {interface: (name, dict(items)) for name, interface, items in self.interfaces(ty.exports(ENGINE), "querl:")}
            with self.linker.root() as root:
                for name, interface, items in self.interfaces(ty.imports(ENGINE), ""):
                    with root.add_instance(name) as instance:
                        self.define(instance, interface, items)
        except WasmtimeError as error:
            raise self.fault("load", f"no component for this host: {error}") from None
        kinds = [kind for interface, kind in KINDS.items() if interface in self.exports]
        self.demand("info" in self.exports and kinds, "does not export `info` and the interface of a kind", "load")
        for pair in ({"rewards", "group-rewards"}, {"packed-rewards", "json-rewards"}):
            self.demand(not pair <= set(self.exports), f"exports both of {sorted(pair)}", "load")
        self.contract = self.exports["info"][0].partition("@")[2]
        described = self.call("info", "describe")
        self.description = {"kinds": kinds, "inputs": INPUTS_0_1 if self.contract.startswith("0.1.") else [], **described}
        self.inputs = {use["input"] for use in self.description["inputs"]}
        for key, pattern in (("name", "[a-z0-9-]{1,64}"), ("version", r"(?=.{1,64}$)(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*)){2}(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")):
            self.demand(re.fullmatch(pattern, described[key]), f"its {key} is {ascii(described[key])[:100]}", "load")
        self.title = f"{described['name']} {described['version']}"
        self.settings = {key: rendered(value) for key, value in (settings or {}).items()}
        if refused := self.call("info", "check-settings"):
            raise self.fault("settings", f"setting `{refused['key']}`: {refused['message']}")
        for key in sorted(set(self.settings) - self.read):
            raise self.fault("settings", f"setting `{key}`: the plugin does not read it")
        self.reward = next((name for name in ("rewards", "group-rewards") if name in self.exports), None)
        if self.reward:
            low, high = self.range = tuple(self.call(self.reward, "range").values())
            self.demand(-1e9 <= low < high <= 1e9, f"its range is {low} to {high}")

    def interfaces(self, externs, prefix):
        """Yields name, short name (without `querl:plugin/`) and items of each import or export with the prefix. Checks the versions."""
        for name, extern in ((name, extern) for name, extern in externs.items() if name.startswith(prefix)):
            scope, _, version = name.partition("@")
            is_ours = scope.startswith("querl:plugin/")
            self.demand(is_ours or scope.startswith("wasi:"), f"imports `{name}`, which is not of the contract", "load")
            is_known = not is_ours or version.startswith(("0.1.", "0.2."))
            self.demand(is_known, f"was built for version {version} of the contract; this host has 0.1 and 0.2", "load")
            items = [(key, item.ty) for key, item in extern.ty.exports(ENGINE).items()]
            yield name, scope.removeprefix("querl:plugin/"), items

    def define(self, instance, interface, items):
        for name, ty in items:
            if isinstance(ty, c.ResourceType):
                instance.add_resource(name, c.ResourceType.host(0), lambda *_: None)
            elif isinstance(ty, c.FuncType):
                is_wasi = interface.startswith("wasi:")
                instance.add_func(name, self.wasi(interface, name, ty.result) if is_wasi else self.host_function(f"{interface}.{name}", ty))

    def refuse(self, kind, message):
        self.refusal = (kind, message)
        raise WasmtimeError(message)

    def host_function(self, name, ty):
        """Implements `settings.get`, `log.log`, and host functions, whose results come from the recorded calls of the item."""
        if name == "log.log":
            return lambda *_: None
        if name == "settings.get":
            return lambda _, key: self.read.add(key) or self.settings.get(key)
        self.demand(name in FUNCTIONS, f"imports `{name}`, which this host does not have", "load")
        self.functions.add(name)
        result = shape(ty.result)

        def call(_, argument):
            if self.n_calls_left == 0:
                self.refuse("limit", "exceeded `host_calls_per_item`")
            self.n_calls_left -= 1
            request = {FUNCTIONS[name]: lift(argument)}
            response = next((call["response"] for call in self.recorded if call["request"] == request), {"Err": NOT_RECORDED})
            return lower(result, {"ok": next(iter(response["Ok"].values()))} if "Ok" in response else {"err": response["Err"]})
        return call

    def wasi(self, interface, name, ty):
        """Implements a WASI function: clocks return 0, random numbers are a fixed sequence, stderr is stored; others have no effect."""
        is_refused = interface.startswith(("wasi:filesystem/types", "wasi:sockets", "wasi:http")) or name == "exit"

        def call(_, *arguments):
            borrowed = arguments[0] if name == "poll" else arguments[:1] if name.startswith("[method]") else []
            for handle in borrowed:
                handle.drop(self.store)
            if is_refused:
                self.refuse("trap", f"called `{interface}#{name}`: plugins have no input and output")
            match name:
                case "get-random-bytes" | "get-insecure-random-bytes":
                    if arguments[0] > MAX_RANDOM_BYTES:
                        self.refuse("trap", f"requested {arguments[0]} random bytes at once")
                    return self.random.randbytes(arguments[0])
                case "get-random-u64" | "get-insecure-random-u64": return self.random.getrandbits(64)
                case "insecure-seed" | "get-insecure-seed": return self.random.getrandbits(64), self.random.getrandbits(64)
                case "[method]output-stream.check-write": return 65536
                case "[method]output-stream.write" | "[method]output-stream.blocking-write-and-flush":
                    self.stderr = (self.stderr + arguments[1])[:MAX_STDERR_BYTES]
                case "[method]input-stream.read" | "[method]input-stream.blocking-read": return None  # closed
                case "poll": return list(range(len(borrowed)))
            return nothing(ty)
        return call

    def call(self, interface, function, *arguments, n_items=1, is_lowered=False):
        """Calls an exported function in a new instance, with fuel and host calls for `n_items`, and checks the size of the result."""
        limits = self.limits
        self.store, self.random, self.stderr, self.refusal, self.read = Store(ENGINE), random.Random(0), b"", None, set()
        self.n_calls_left = limits["host_calls_per_item"] * n_items
        self.store.set_fuel(limits["fuel_per_call"] + n_items * limits["fuel_per_item"])
        self.store.set_epoch_deadline(limits["timeout_ms"] // TICK_MS + 1)
        self.store.set_limits(memory_size=limits["memory_bytes"], table_elements=100_000, instances=100, tables=32, memories=2)
        name, types = self.exports[interface]
        values = arguments if is_lowered else [lower(shape(ty), value) for (_, ty), value in zip(types[function].params, arguments)]
        try:
            instance = self.linker.instantiate(self.store, self.component)
            index = instance.get_export_index(self.store, function, instance.get_export_index(self.store, name))
            returned = lift(instance.get_func(self.store, index)(self.store, *values))
        except (WasmtimeError, UnicodeDecodeError) as error:
            raise self.explained(str(error)) from None
        size = len(returned if isinstance(returned, (bytes, str)) else json.dumps(returned, ensure_ascii=False))
        self.demand(size <= limits["output_bytes"], f"returned more than {limits['output_bytes']} bytes (`output_bytes`)", "limit")
        return returned

    def explained(self, message):
        limits = {"all fuel consumed": "fuel_per_item", "wasm trap: interrupt": "timeout_ms", "memory minimum size": "memory_bytes"}
        for text, limit in limits.items():
            if text in message:
                return self.fault("limit", f"exceeded `{limit}`")
        cause = message.splitlines()[-1].strip()
        if self.refusal or "wasm trap" in message:
            return self.fault(*self.refusal or ("trap", self.stderr.decode(errors="replace").strip() or cause))
        return self.fault("result", f"returned what cannot be read: {cause}")

    def fault(self, kind, message):
        return Fault(kind, f"plugin {self.title}: {message}")

    def demand(self, is_true, message, kind="result"):
        if not is_true:
            raise self.fault(kind, message)

    def rejection(self, item, rejection):
        self.demand(re.fullmatch("[a-z0-9_]{1,64}", rejection["code"]), f"{item}: the code is {ascii(rejection['code'])[:100]}")
        self.codes.add(rejection["code"])
        self.demand(len(self.codes) <= 256, f"{item}: `{rejection['code']}` is one code more than 256")
        return {"rejected": rejection}

    def result(self, item, result):
        """Checks a result of a reward or a style scorer."""
        (case, score), = result.items()
        if case in ("err", "rejected"):
            return self.rejection(item, score)
        total, (low, high), names = score["total"], self.range, [part["name"] for part in score["components"]]
        self.demand(low <= total <= high, f"{item}: the total is {total}; expected {low} to {high}")
        self.demand(len(names) <= 64 and len(set(names)) == len(names), f"{item}: expected at most 64 components, each once")
        for part in score["components"]:
            self.demand(re.fullmatch("[a-z0-9_]{1,64}", part["name"]), f"{item}: a component is called {ascii(part['name'])[:100]}")
            self.demand(abs(part["value"]) <= 1e18, f"{item}: component `{part['name']}` is {part['value']}")
        self.names.update(names)
        self.demand(len(self.names) <= 256, f"{item}: more than 256 names of components")
        return {"scored": score}

    def results(self, items, results, check):
        self.demand(len(results) == len(items), f"returned {len(results)} results for {len(items)} items, from `{items[0]['id']}`")
        return [check(f"item `{item['id']}`", result) for item, result in zip(items, results)]

    def score(self, episodes, calls=None):
        """`{"scored": ...}` or `{"rejected": ...}` per episode. `calls`: recorded calls by episode id; by group id for group rewards."""
        self.demand(self.reward, "is no reward", "load")
        episodes, batches, scored = [self.stripped(episode) for episode in episodes], {}, {}
        for index, episode in enumerate(episodes):
            key = episode["group_id"] if self.reward == "group-rewards" else episode["id"] if self.functions else None
            batches.setdefault(key, []).append(index)
        for key, indices in batches.items():
            batch, self.recorded = [episodes[index] for index in indices], (calls or {}).get(key, [])
            scored.update(zip(indices, self.results(batch, self.score_call(batch), self.result)))
        return [scored[index] for index in range(len(episodes))]

    def stripped(self, episode):
        """The episode without the inputs that the plugin does not declare."""
        def without(record, names):
            return {key: value for key, value in record.items() if key not in names or key in self.inputs}
        episode = without(episode, ("response", "prompt", "columns", "baseline"))
        sides = {side: without(episode[side], ("retrieval", "judgement", "style")) for side in ("policy", "baseline") if side in episode}
        return {**episode, **sides}

    def score_call(self, batch):
        """Calls the reward with a batch in its JSON form or packed form, if it exports one, else as records."""
        function = "score-group" if self.reward == "group-rewards" else "score-batch"
        types = self.exports[self.reward][1][function]
        try:
            if "json-rewards" in self.exports:
                text = json.dumps(batch, ensure_ascii=False, separators=(",", ":"))
                return json.loads(self.call("json-rewards", "score-json", text, n_items=len(batch)))
            if "packed-rewards" in self.exports:
                packed = pack(shape(types.params[0][1]), batch)
                return unpack(shape(types.result), self.call("packed-rewards", "score-packed", packed, n_items=len(batch), is_lowered=True))
        except (ValueError, struct.error) as error:
            raise self.fault("result", f"returned an invalid JSON or packed form: {error}") from None
        return self.call(self.reward, function, batch, n_items=len(batch))

    def style(self, dialogues, calls=None):
        scored = []
        for dialogue in dialogues:
            self.recorded = (calls or {}).get(dialogue["id"], [])
            scored += self.results([dialogue], self.call("style-scores", "score-batch", [dialogue]), self.result)
        return scored

    def filter(self, samples, calls=None):
        self.recorded = (calls or {}).get("", [])
        kept = [{key: value for key, value in sample.items() if key != "columns" or key in self.inputs} for sample in samples]
        verdict = lambda item, dropped: {"drop": self.rejection(item, dropped)["rejected"]} if dropped else "keep"
        return self.results(samples, self.call("filters", "check-batch", kept, n_items=len(samples)), verdict)

    def messages(self, task, prompt):
        made = self.call("prompts", "messages", task, prompt)
        if isinstance(made, dict):
            return self.rejection("messages", made)
        roles = [message["role"] for message in made]
        self.demand(roles and roles[-1] == "user" and "system" not in roles[1:], f"the roles of its messages are {roles}")
        return {"messages": made}

    def parse_rewrite(self, text):
        parsed = self.call("prompts", "parse-rewrite", text)
        if isinstance(parsed, dict):
            return self.rejection("parse-rewrite", parsed)
        self.demand(parsed.strip(), "parse-rewrite returned a blank rewrite")
        return {"rewrite": parsed}

    def parse_judgement(self, text):
        parsed = self.call("prompts", "parse-judgement", text)
        if "err" in parsed:
            return self.rejection("parse-judgement", parsed["err"])
        self.demand(0 <= parsed["ok"]["score"] <= 5, f"parse-judgement returned the score {parsed['ok']['score']}; expected 0 to 5")
        return {"judgement": parsed["ok"]}


def rendered(value):
    """The text form of a setting, as `settings.get` returns it: decimal notation for numbers, JSON for booleans and lists."""
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
