import unittest
from pathlib import Path

from plugin import BannedClaims
from querl_sdk import Rejection, SettingError, Settings
from querl_sdk.testing import check_contract, check_golden, sample

FOLDER = Path(__file__).parents[1]


def code(rewrite: str, settings: dict[str, object] | None = None) -> str:
    try:
        BannedClaims(Settings(settings)).check(sample("这个能吃吗", rewrite))
    except Rejection as rejection:
        return rejection.code
    return "keep"


class TestBannedClaims(unittest.TestCase):
    def test_golden_cases(self) -> None:
        self.assertGreaterEqual(check_golden(BannedClaims, FOLDER / "golden"), 9)

    def test_contract(self) -> None:
        check_contract(BannedClaims)
        check_contract(BannedClaims, {"questions": "drop", "extra_words": ["神药"], "allowed": ["神药谷"]})

    def test_negation_reaches_the_word_through_helpers_only(self) -> None:
        for rewrite in ["不能根治", "无法彻底治愈", "并非没有副作用", "不得声称根治", "不可以用来替代药物"]:
            self.assertEqual(code(rewrite), "keep", rewrite)
        for rewrite in ["不得不说它根治失眠", "不吃就后悔的根治秘方", "非常好，治愈失眠"]:
            self.assertEqual(code(rewrite), "cure_claim", rewrite)

    def test_negation_does_not_reach_into_the_next_clause(self) -> None:
        self.assertEqual(code("不能替代药物，无副作用"), "safety_claim")

    def test_words_of_treatment_alone_are_no_claim(self) -> None:
        for rewrite in ["治疗期间的饮食", "药物与鱼油的相互作用", "停药后多久可以吃鱼油", "副作用有哪些"]:
            self.assertEqual(code(rewrite), "keep", rewrite)

    def test_question_in_one_sentence_leaves_the_other_a_claim(self) -> None:
        self.assertEqual(code("鱼油怎么吃？鱼油根治高血压。"), "cure_claim")

    def test_rejection_names_the_word(self) -> None:
        with self.assertRaises(Rejection) as raised:
            BannedClaims(Settings()).check(sample("", "护肝片保证有效"))
        self.assertEqual(raised.exception.detail, "the rewrite claims `保证有效`")

    def test_unusable_settings_are_refused(self) -> None:
        for key, value in [("questions", "maybe"), ("extra_words", "神药"), ("allowed", [" "])]:
            with self.assertRaises(SettingError) as raised:
                BannedClaims(Settings({key: value}))
            self.assertEqual(raised.exception.key, key)

    def test_a_claim_far_into_a_long_text_is_found(self) -> None:
        self.assertEqual(code("虾青素的吃法，" * 5000 + "无副作用"), "safety_claim")
        self.assertEqual(code("有效成分、安全用量，" * 5000), "keep")
