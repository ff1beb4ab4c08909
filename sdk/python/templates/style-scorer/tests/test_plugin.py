import unittest
from pathlib import Path

from plugin import OneStyle
from querl_sdk import Rejection, Settings
from querl_sdk.testing import check_contract, check_golden, dialogue, failed, style_model

FOLDER = Path(__file__).parents[1]


class TestOneStyle(unittest.TestCase):
    def test_golden_cases(self) -> None:
        check_golden(OneStyle, FOLDER / "golden")

    def test_contract(self) -> None:
        check_contract(OneStyle)

    def test_a_model_that_fails_or_lacks_the_class_gives_no_score(self) -> None:
        scorer = OneStyle(Settings({"label": "投诉"}))
        for model, code in [(style_model(failure=failed()), "no_style"), (style_model({"售前": 1.0}), "unknown_class")]:
            with self.assertRaises(Rejection) as raised:
                scorer.score(dialogue("在吗", "在的"), model)
            self.assertEqual(raised.exception.code, code)
