import unittest
from pathlib import Path

from plugin import TenantPrompt
from querl_sdk import Context, PromptInput, PromptTask, Rejection, Settings
from querl_sdk.testing import check_contract, check_golden

FOLDER = Path(__file__).parents[1]


class TestTenantPrompt(unittest.TestCase):
    def test_golden_cases(self) -> None:
        check_golden(TenantPrompt, FOLDER / "golden")

    def test_contract(self) -> None:
        check_contract(TenantPrompt)

    def test_braces_of_a_user_stay_as_they_are(self) -> None:
        asked = PromptInput(query="{domain} 是什么", context=Context(history_summary="问过{鱼油}"))
        messages = TenantPrompt(Settings()).messages(PromptTask.POLICY_REWRITE, asked)
        self.assertEqual(messages[-1].content, "历史：问过{鱼油}\n问题：{domain} 是什么")

    def test_an_answer_without_a_score_is_no_guess(self) -> None:
        with self.assertRaises(Rejection):
            TenantPrompt(Settings()).parse_judgement("改写得不错")
