import unittest
from pathlib import Path

from plugin import Diversity
from querl_sdk import Settings
from querl_sdk.testing import check_contract, check_golden, episode

FOLDER = Path(__file__).parents[1]


class TestDiversity(unittest.TestCase):
    def test_golden_cases(self) -> None:
        check_golden(Diversity, FOLDER / "golden")

    def test_contract(self) -> None:
        check_contract(Diversity)

    def test_equal_samples_score_0(self) -> None:
        same = [episode("鱼油", "深海鱼油", sample_index=index) for index in range(3)]
        self.assertEqual([score.total for score in Diversity(Settings()).score_group(same)], [0.0, 0.0, 0.0])
