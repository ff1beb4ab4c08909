import unittest
from pathlib import Path

from plugin import Length
from querl_sdk import Rejection, Settings
from querl_sdk.testing import check_contract, check_golden, sample

FOLDER = Path(__file__).parents[1]


class TestLength(unittest.TestCase):
    def test_golden_cases(self) -> None:
        check_golden(Length, FOLDER / "golden")

    def test_contract(self) -> None:
        check_contract(Length)

    def test_reason_says_how_long_and_how_long_it_may_be(self) -> None:
        with self.assertRaises(Rejection) as raised:
            Length(Settings({"max_chars": 3})).check(sample("鱼油", "深海鱼油"))
        self.assertEqual(raised.exception, Rejection("too_long", "4 characters; at most 3 allowed"))
