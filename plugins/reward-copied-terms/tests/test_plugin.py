import unittest
from pathlib import Path

from plugin import CopiedTerms
from querl_sdk import SettingError, Settings
from querl_sdk.testing import check_contract, check_golden, episode

FOLDER = Path(__file__).parents[1]


class TestCopiedTerms(unittest.TestCase):
    def test_golden_cases(self) -> None:
        self.assertGreaterEqual(check_golden(CopiedTerms, FOLDER / "golden"), 8)

    def test_contract(self) -> None:
        check_contract(CopiedTerms)
        check_contract(CopiedTerms, {"ngram": 1, "max_query_share": 0, "max_profile_share": 0})

    def test_a_term_of_both_counts_for_the_query(self) -> None:
        score = CopiedTerms(Settings()).score(episode("孕妇鱼油", "孕妇", user_profile="孕妇"))
        self.assertEqual(score.components, {"query_share": 1.0, "profile_share": 0.0})

    def test_the_charge_reaches_the_end_of_the_range_and_no_further(self) -> None:
        strict = CopiedTerms(Settings({"max_query_share": 0, "max_profile_share": 0}))
        self.assertEqual(strict.score(episode("鱼油", "鱼油孕妇", user_profile="油孕妇")).total, -1.0)

    def test_unusable_settings_are_refused(self) -> None:
        for key, value in [("ngram", 0), ("max_query_share", 1.1), ("max_profile_share", "much")]:
            with self.assertRaises(SettingError) as raised:
                CopiedTerms(Settings({key: value}))
            self.assertEqual(raised.exception.key, key)
