"""The native replay of recorded episodes, for `querl plugin dev`."""

import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

SDK = Path(__file__).resolve().parents[1]

GROUP = '''from querl_sdk import Episode, GroupReward, Rejection, Score, export, host, log


class Group(GroupReward):
    requires = ("columns",)

    def range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score_group(self, episodes: list[Episode]) -> list[Score | Rejection]:
        log.info(" ".join(episode.id for episode in episodes))
        if episodes[0].query == "fault":
            return [Score(1 / 0)]
        vector = host.embed(["x"])[0]
        seen = [(episode.columns.get("n"), episode.response, episode.policy.retrieval) for episode in episodes]
        return [Score(vector[0], {"n": n}) if n and not response and retrieval is None else Rejection("odd") for n, response, retrieval in seen]


export(group_reward=Group)
'''


def results_of(plugin: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        episodes, results = Path(folder, "episodes.jsonl"), Path(folder, "results.jsonl")
        Path(folder, "plugin.py").write_text(plugin, encoding="utf-8")
        episodes.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        command = [sys.executable, "-m", "querl_sdk.dev", folder, str(episodes), "{}", str(results)]
        subprocess.run(command, check=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(SDK)})
        return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


class TestDev(unittest.TestCase):
    def test_groups_see_declared_inputs_and_recorded_results(self) -> None:
        def line(group: str, index: int, query: str, **columns: float) -> dict[str, Any]:
            episode = {"id": f"{group}/{index}", "group_id": group, "sample_index": index, "query": query, "columns": columns}
            hidden = {"response": "r", "policy": {"retrieval": {"hits": []}}}
            call = {"plugin": "p", "request": {"embed": ["x"]}, "response": {"Ok": {"vectors": [[0.1]]}}}
            return {"format": 3, "step": 0, "episode": {**episode, **hidden}, "calls": [call] if index == 0 else []}

        lines = [line("a", 0, "q", n=1), line("b", 0, "fault"), line("a", 1, "q", n=2), line("a", 2, "q")]
        # As a component has it: f32.
        total = struct.unpack("f", struct.pack("f", 0.1))[0]
        scored = [{"scored": {"total": total, "components": [{"name": "n", "value": n}]}} for n in (1.0, 2.0)]
        fault = {"message": "ZeroDivisionError: division by zero", "file": "plugin.py", "line": 13}
        expected = [
            {"range": [0.0, 1.0]},
            {**scored[0], "log": ["info: a/0 a/1 a/2"]},
            {"fault": fault, "log": ["info: b/0"]},
            scored[1],
            {"rejected": {"code": "odd", "detail": ""}},
        ]
        self.assertEqual(results_of(GROUP, lines)[:-1], expected)

    def test_a_plugin_that_exits_is_a_fault_of_its_line(self) -> None:
        """Symptom: `sys.exit()` in a reward ended the replay with the traceback of the SDK."""
        line = {"format": 3, "episode": {"id": "a/0", "group_id": "a", "sample_index": 0, "query": "q", "policy": {}}, "calls": []}
        exits = GROUP.replace('log.info(" ".join(episode.id for episode in episodes))', "raise SystemExit(0)")
        fault = {"message": "SystemExit: 0", "file": "plugin.py", "line": 11}
        self.assertEqual(results_of(exits, [line])[1]["fault"], fault)

    def test_a_call_that_was_not_recorded_rejects(self) -> None:
        line = {"format": 3, "episode": {"id": "a/0", "group_id": "a", "sample_index": 0, "query": "q", "policy": {}}, "calls": []}
        rejected = {"code": "similarity_failed", "detail": "the recording has no result for this call"}
        self.assertEqual(results_of(GROUP, [line])[1]["rejected"], rejected)


if __name__ == "__main__":
    unittest.main()
