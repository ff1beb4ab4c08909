"""Tests of the host, without network: run `python test_host.py` in an environment with requirements.txt."""

import json, struct, unittest
from pathlib import Path
from querl_host import Fault, Plugin
from values import pack, shape, unpack

ROOT = Path(__file__).parents[2]
PROBES = ROOT / "host/querl-conformance/probes"
EPISODE = {"id": "a", "group_id": "a", "sample_index": 0, "query": "0.25", "policy": {}}


class Vectors(unittest.TestCase):
    """The packed form against the test vectors of the specification (docs/spec/vectors)."""

    @classmethod
    def setUpClass(cls):
        types = Plugin(PROBES / "plain.wasm").exports["rewards"][1]["score-batch"]
        cls.episodes, cls.results = shape(types.params[0][1]), shape(types.result)
        cls.vectors = json.loads((ROOT / "docs/spec/vectors/packed-0.2.json").read_text())

    def test_arguments_are_packed_to_the_byte(self):
        for vector in self.vectors["arguments"]:
            with self.subTest(vector["name"]):
                self.assertEqual(pack(self.episodes, vector["json"]).hex(), vector["packed"])

    def test_results_are_read(self):
        for vector in self.vectors["results"]:
            with self.subTest(vector["name"]):
                read = unpack(self.results, bytes.fromhex(vector["packed"]))
                names = {"ok": "scored", "err": "rejected"}
                read = [{names[case]: value} for result in read for case, value in result.items()]
                self.assertEqual(json.dumps(read), json.dumps(vector["json"]))

    def test_invalid_results_are_refused(self):
        for vector in self.vectors["invalid_results"]:
            with self.subTest(vector["name"]), self.assertRaises((ValueError, struct.error)):
                if len(unpack(self.results, bytes.fromhex(vector["packed"]))) != 1:
                    raise ValueError("expected one result")


class Host(unittest.TestCase):
    def test_a_fault_is_a_value_and_the_next_call_works(self):
        plugin = Plugin(PROBES / "plain.wasm", {"mode": "panic-on-bad"})
        with self.assertRaises(Fault) as raised:
            plugin.score([{**EPISODE, "query": "bad"}])
        self.assertEqual(raised.exception.kind, "trap")
        self.assertIn("host-probe 1.2.3", str(raised.exception))
        self.assertEqual(plugin.score([EPISODE]), [{"scored": {"total": 0.5, "components": []}}])

    def test_fuel_ends_a_loop(self):
        plugin = Plugin(PROBES / "plain.wasm", {"mode": "loop"}, {"fuel_per_call": 10_000_000, "fuel_per_item": 1})
        with self.assertRaises(Fault) as raised:
            plugin.score([EPISODE])
        self.assertEqual(raised.exception.kind, "limit")


if __name__ == "__main__":
    unittest.main()
