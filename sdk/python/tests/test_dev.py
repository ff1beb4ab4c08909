"""Tests of the native replay of recorded episodes, for `querl plugin dev`."""

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

REWARD = '''import re
from querl_sdk import Episode, Reward, Score, export, host


class Odd(Reward):
    def range(self) -> tuple[float, float]:
        return 0.0, 1.0


    def score(self, episode: Episode) -> Score:
        # A line of the body:
        {body}


export(reward=Odd)
'''


def episode(id: str, query: str) -> dict[str, Any]:
    return {"format": 3, "episode": {"id": id, "group_id": id, "sample_index": 0, "query": query, "policy": {}}, "calls": []}


def results_of(plugin: str, lines: list[dict[str, Any]], **more: str) -> list[dict[str, Any]]:
    """The lines of results without the `begun` lines. `more`: environment variables."""
    with tempfile.TemporaryDirectory() as folder:
        episodes, results = Path(folder, "episodes.jsonl"), Path(folder, "results.jsonl")
        Path(folder, "plugin.py").write_text(plugin, encoding="utf-8")
        episodes.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        command = [sys.executable, "-m", "querl_sdk.dev", folder, str(episodes), "{}", str(results)]
        subprocess.run(command, check=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(SDK), **more})
        found = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
        return [line for line in found if "begun" not in line]


class TestDev(unittest.TestCase):
    def test_groups_see_declared_inputs_and_recorded_results(self) -> None:
        def line(group: str, index: int, query: str, **columns: float) -> dict[str, Any]:
            episode = {"id": f"{group}/{index}", "group_id": group, "sample_index": index, "query": query, "columns": columns}
            hidden = {"response": "r", "policy": {"retrieval": {"hits": []}}}
            call = {"plugin": "p", "request": {"embed": ["x"]}, "response": {"Ok": {"vectors": [[0.1]]}}}
            return {"format": 3, "step": 0, "episode": {**episode, **hidden}, "calls": [call] if index == 0 else []}

        lines = [line("a", 0, "q", n=1), line("b", 0, "fault"), line("a", 1, "q", n=2), line("a", 2, "q")]
        # f32, as in a component.
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

    def test_an_episode_that_does_not_end_is_a_fault_of_its_line_and_the_others_are_scored(self) -> None:
        """Symptom: a run hung without a message in a regular expression with catastrophic backtracking."""
        results = results_of(REWARD.format(body="""if episode.query == "x":
            try:
                re.match("^(a+)+$", "a" * 40 + "b")
            except Exception:
                pass
        return Score(0.5)"""), [episode("a", "q"), episode("b", "x"), episode("c", "q")])
        scored = {"scored": {"total": 0.5, "components": []}}
        message = "still ran after 5 s: an endless loop, or a regular expression that tries too many ways"
        self.assertEqual(results[1:-1], [scored, {"fault": {"message": message, "file": "plugin.py", "line": 14}}, scored])

    def test_an_undeclared_host_function_is_the_fault_of_the_component(self) -> None:
        """Symptom: a call of an undeclared interface was natively a rejection, `tokens_failed`."""
        plugin = REWARD.format(body="return Score(float(host.count_tokens(episode.query)))")
        for declared, key in [("words", "fault"), ("tokens words", "rejected")]:
            [_, result, _] = results_of(plugin, [episode("a", "q")], QUERL_HOST_FUNCTIONS=declared)
            self.assertIn(key, result)
        fault = results_of(plugin, [episode("a", "q")], QUERL_HOST_FUNCTIONS="words")[1]["fault"]
        self.assertEqual(fault["message"], "TypeError: `querl_sdk.host` needs the interface `tokens`; add it to host_functions in plugin.toml")
        self.assertEqual(fault["line"], 12)

    def test_what_a_component_cannot_do_is_remarked_once(self) -> None:
        """Symptom: an import in a function works natively, and fails in the component."""
        plugin = REWARD.format(body="import wave\n        open('/dev/null').close()\n        return Score(0.5)")
        results = results_of(plugin, [episode("a", "q"), episode("b", "q")])
        logged = results[1]["log"]
        self.assertTrue(any(line.startswith("component: imports `wave` in a call") for line in logged), logged)
        self.assertIn("component: opens `/dev/null`: a component has no files; have the data in a module next to plugin.py", logged)
        self.assertNotIn("log", results[2])

    def test_of_imports_only_those_of_the_plugin_are_remarked(self) -> None:
        """Symptom: the imports of imported modules, 63 lines, hid the remark about the network."""
        body = """import csv, concurrent.futures
        import os, socket
        os.listdir("/")
        for n in range(9):
            try:
                open(f"/nowhere/{n}")
            except OSError:
                pass
        try:
            socket.socket().connect(("127.0.0.1", 1))
        except OSError:
            pass
        return Score(0.5)"""
        results = results_of(REWARD.format(body=body), [episode("a", "q")])
        said = [line.split(":")[1].removesuffix(" in a call").strip() for line in results[1]["log"]]
        imports = [f"imports `{module}`" for module in ("csv", "concurrent.futures", "socket")]
        opens = [f"opens `/nowhere/{n}`" for n in range(5)]
        self.assertEqual(said, [*imports, "uses `/`", *opens, "calls the network"])

    def test_a_range_that_is_not_two_numbers_is_named(self) -> None:
        """Symptom: `TypeError: 'float' object is not iterable`, without file, line and method."""
        plugin = REWARD.format(body="return Score(0.5)")
        for returned in ("1.0", "(0.0, 1.0, 2.0)", "('0', '1')", "None"):
            [refused] = results_of(plugin.replace("0.0, 1.0", returned), [episode("a", "q")])
            expected = f"TypeError: plugin.py: `Odd.range` returned {returned}; expected two numbers (low, high)"
            self.assertEqual(refused, {"refused": {"message": expected}})

    def test_a_result_that_is_none_of_the_contract_is_a_fault(self) -> None:
        """Symptom: `Score(0.5, None)` ended the run with the traceback of the SDK."""
        for body, message in [("return Score(0.5, None)", "TypeError: "), ("return Score(0.5, {1: 0.5})", "the component name is 1; expected a text")]:
            [_, result, _] = results_of(REWARD.format(body=body), [episode("a", "q")])
            self.assertTrue(result["fault"]["message"].startswith(message), result)
        endless = REWARD.format(body="return Score(0.5)").replace("0.0, 1.0", "0.0, float('inf')")
        self.assertIn("declares the range 0.0 to inf; expected two finite numbers", results_of(endless, [episode("a", "q")])[0]["refused"]["message"])


if __name__ == "__main__":
    unittest.main()
