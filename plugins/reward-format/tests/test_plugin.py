import json
import unittest
from pathlib import Path

from plugin import Format
from querl_sdk import Rejection, SettingError, Settings
from querl_sdk.testing import check_contract, check_golden, episode
from schema import compile_schema

FOLDER = Path(__file__).parents[1]


class TestFormat(unittest.TestCase):
    def test_golden_cases(self) -> None:
        self.assertGreaterEqual(check_golden(Format, FOLDER / "golden"), 10)

    def test_contract(self) -> None:
        check_contract(Format)
        check_contract(Format, {"form": "json", "schema": "true", "max_chars": 1})

    def test_a_missing_response_is_rejected_and_an_empty_one_scored(self) -> None:
        self.assertEqual(Format(Settings()).score(episode("鱼油", response="")).total, 0.0)
        with self.assertRaises(Rejection) as raised:
            Format(Settings()).score(episode("鱼油"))
        self.assertEqual(raised.exception.code, "response_missing")

    def test_unusable_settings_are_refused(self) -> None:
        for key, value in [("pattern", "("), ("schema", "{"), ("schema", '{"$ref": "#"}'), ("schema", "[]"), ("form", "xml"), ("max_chars", 0)]:
            with self.assertRaises(SettingError) as raised:
                Format(Settings({key: value}))
            self.assertEqual(raised.exception.key, key)

    def test_schema(self) -> None:
        for schema, valid, invalid in [
            ({"type": "integer"}, ["1", "1.0"], ["1.5", "true", "1e400"]),
            ({"type": ["string", "null"]}, ['""', "null"], ["0"]),
            ({"enum": [1, "a"]}, ["1", '"a"'], ["true", '"b"']),
            ({"items": {"minimum": 0, "maximum": 5}}, ["[]", "[0, 5]", "7"], ["[6]", "[-1]"]),
            ({"properties": {"a": {"maxLength": 2}}, "additionalProperties": False}, ["{}", '{"a": "鱼油"}'], ['{"b": 0}', '{"a": "鱼肝油"}']),
            ({"minItems": 1, "maxItems": 2, "required": ["a"]}, ["[1]", '{"a": 1}', "0"], ["[]", "[1, 2, 3]", "{}"]),
            (False, [], ["null"]),
        ]:
            is_valid = compile_schema(schema)
            for text in valid:
                self.assertTrue(is_valid(json.loads(text)), (schema, text))
            for text in invalid:
                self.assertFalse(is_valid(json.loads(text)), (schema, text))
        for schema in [{"type": "text"}, {"minLength": "1"}, {"required": "a"}, {"properties": []}, {"items": 1}]:
            with self.assertRaises(ValueError):
                compile_schema(schema)
