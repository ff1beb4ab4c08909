import unittest
from pathlib import Path

from plugin import Brevity
from querl_sdk import Settings
from querl_sdk.testing import check_contract, check_golden, episode

FOLDER = Path(__file__).parents[1]


class TestBrevity(unittest.TestCase):
    def test_golden_cases(self) -> None:
        check_golden(Brevity, FOLDER / "golden")

    def test_contract(self) -> None:
        check_contract(Brevity)

    def test_the_shorter_rewrite_scores_higher(self) -> None:
        brevity = Brevity(Settings())
        short, long = episode("胶原咋吃", "胶原蛋白肽"), episode("胶原咋吃", "胶原蛋白肽的正确服用方法")
        self.assertGreater(brevity.score(short).total, brevity.score(long).total)
