"""Which words make a claim, and when a sentence with such a word does not make it."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

_SURE = r"(?:100%|百分之?百|百分之一百)的?"
_MEDICINE = r"(?:药物|药品|药|医生|治疗|手术)"

# By code. The first that matches is the one given.
PATTERNS: dict[str, str] = {
    "cure_claim": r"根治|根除病|治愈|治好|痊愈|断根|除根|包治|包好|药到病除|永不复发|不再复发|起死回生|妙手回春",
    "safety_claim": r"(?:无|零|0|没有|没|毫无|不含)(?:任何|一点|丝毫)?(?:毒副作用|副作用|不良反应|依赖性)|绝对安全|" + _SURE + "安全",
    "replaces_medicine": rf"(?:替代|代替|取代|替换){_MEDICINE}|(?:不用|不必|无需|无须)(?:再)?(?:吃药|服药|用药|就医|看医生)|可以?停药",
    "guarantee_claim": _SURE + r"(?:有效|见效|管用)|保证(?:有效|见效)|有效率(?:高)?达|立竿见影|一吃就(?:灵|好)|无效退款|包(?:有效|见效)",
}

_SENTENCE_END = re.compile(r"(?<=[。！!？?\n])")
_CLAUSE_END = re.compile(r"[，,、；;：:]")
_QUESTION = re.compile(r"[?？吗]|能否|可否|是否|能不能|可不可以|是不是|会不会|有没有|有无|真的么|什么|怎么|哪些|为何|为什么")
# A negation reaches the word through helpers only: 不能完全替代药物, but not 不得不说它根治.
_HELPERS = r"(?:能够|能|可以|可|会|得|应该|应|要|是|用于|用来|用|作为|当作|完全|直接|彻底|声称|宣称|宣传|保证|具有|起到|有|被|用作|说成|指望)"
_NEGATIONS = r"(?:无法|并非|绝非|禁止|避免|并不|不|没|未|勿|别|非)"
_NEGATED = re.compile(rf"(?:{_NEGATIONS}{_HELPERS}*)+$")


@dataclass(frozen=True)
class Claim:
    """A claim that a text makes."""

    code: str
    word: str


class Claims:
    """Finds claims. `allowed` phrases are not looked into; `questions_count` says whether a question makes a claim."""

    def __init__(self, extra_words: list[str], allowed: list[str], *, questions_count: bool) -> None:
        patterns = dict(PATTERNS)
        if extra_words:
            patterns["banned_word"] = "|".join(re.escape(normalised(word)) for word in extra_words)
        self._patterns = {code: re.compile(pattern) for code, pattern in patterns.items()}
        self._allowed = sorted((normalised(phrase) for phrase in allowed), key=len, reverse=True)
        self._questions_count = questions_count

    def first(self, text: str) -> Claim | None:
        """The first claim of the first code that has one."""
        text = normalised(text)
        for phrase in self._allowed:
            text = text.replace(phrase, "、")
        sentences = [sentence for sentence in _SENTENCE_END.split(text) if self._counts(sentence)]
        clauses = [clause for sentence in sentences for clause in _CLAUSE_END.split(sentence)]
        for code, pattern in self._patterns.items():
            for clause in clauses:
                for match in pattern.finditer(clause):
                    if not _is_negated(clause[: match.start()], match.group()):
                        return Claim(code, match.group())
        return None

    def _counts(self, sentence: str) -> bool:
        return self._questions_count or _QUESTION.search(sentence) is None


def normalised(text: str) -> str:
    """Full-width forms as ASCII, lower case, no blanks: １００％ 有效 is 100%有效."""
    return re.sub(r"[^\S\n]+", "", unicodedata.normalize("NFKC", text)).lower()


def _is_negated(before: str, word: str) -> bool:
    if word.startswith("没") and before.endswith("有"):
        return True  # 有没有副作用 asks.
    chain = _NEGATED.search(before)
    # 没有不能治愈的 denies twice.
    return chain is not None and len(re.findall(_NEGATIONS, chain.group())) % 2 == 1
