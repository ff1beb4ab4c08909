"""Finds claims in a text by words and patterns. Negations, questions and allowed phrases are not claims: see README.md."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

_SURE = r"(?:100%|百分之?百|百分之一百)的?"
_HARM = ("副作用", "不良反应", "依赖性")
_CURES = (
    "根治 根除病 治愈 治好 痊愈 断根 除根 包治 包好 药到病除 永不复发 不再复发 起死回生 妙手回春".split()
)
_REPLACING = ("替代", "代替", "取代", "替换")
_TREATMENT = ("吃药", "服药", "用药", "就医", "看医生", "停药")
_WORKS = ("有效", "见效", "管用")

_Patterns = dict[str, tuple[tuple[str, ...], re.Pattern[str]]]

# By code of the claim: a list of words, at least one of them in every such claim, and the regular expression of the claim. If a text has
# several claims, the first code is reported.
_WRITTEN: dict[str, tuple[tuple[str, ...], str]] = {
    "cure_claim": (tuple(_CURES), "|".join(_CURES)),
    "safety_claim": (
        (*_HARM, "安全"),
        rf"(?:无|零|0|没有|没|毫无|不含)(?:任何|一点|丝毫)?毒?(?:{'|'.join(_HARM)})|绝对安全|{_SURE}安全",
    ),
    "replaces_medicine": (
        (*_REPLACING, *_TREATMENT),
        rf"(?:{'|'.join(_REPLACING)})(?:药物|药品|药|医生|治疗|手术)"
        r"|(?:不用|不必|无需|无须)(?:再)?(?:吃药|服药|用药|就医|看医生)|可以?停药",
    ),
    "guarantee_claim": (
        (*_WORKS, "立竿见影", "一吃就", "无效退款"),
        rf"(?:{_SURE}|保证|包)(?:{'|'.join(_WORKS)})|有效率(?:高)?达|立竿见影|一吃就(?:灵|好)|无效退款",
    ),
}
# Compiled when the module is loaded, which is when the component is built. In `Claims` it would cost 14 million units of fuel per call.
PATTERNS: _Patterns = {code: (words, re.compile(pattern)) for code, (words, pattern) in _WRITTEN.items()}
# Most texts have none of the words: one search for all of them is cheaper than one search for each.
_ANY_WORD = re.compile("|".join(word for words, _ in _WRITTEN.values() for word in words))
# Maximum distance in characters between a word and the start or end of a match that contains it.
_REACH = 12

_SENTENCE_ENDS = "。!?\n"
_CLAUSE_ENDS = _SENTENCE_ENDS + ",、;:"
_QUESTIONS = "? 吗 能否 可否 是否 能不能 可不可以 是不是 会不会 有没有 有无 真的么 什么 怎么 哪些 为何".split()
# Words that may stand between a negation and a claim: 不能完全替代药物 is negated. With other words between them a claim is not negated:
# 不得不说它根治.
_HELPERS = (
    r"(?:能够|能|可以|可|会|得|应该|应|要|是|用于|用来|用作|用|作为|当作|完全|直接|彻底|声称|宣称|宣传|保证|具有|起到|有|被|指望)"
)
_NEGATIONS = r"(?:无法|并非|绝非|禁止|避免|并不|不|没|未|勿|别|非)"
_NEGATION = re.compile(_NEGATIONS)
_NEGATED = re.compile(rf"(?:{_NEGATIONS}{_HELPERS}*)+$")
_LONGEST_NEGATION = 24


@dataclass(frozen=True)
class Claim:
    """A claim in a text: its code and the matched words."""

    code: str
    word: str


class Claims:
    """Finds claims. `extra_words` are claims too; `allowed` phrases are ignored; `questions_count`: True if questions are claims."""

    def __init__(self, extra_words: list[str], allowed: list[str], *, questions_count: bool) -> None:
        self._extra: _Patterns = {}
        if extra_words:
            words = tuple(normalised(word) for word in extra_words)
            self._extra["banned_word"] = (words, re.compile("|".join(map(re.escape, words))))
        self._allowed = sorted((normalised(phrase) for phrase in allowed), key=len, reverse=True)
        self._questions_count = questions_count

    def first(self, text: str) -> Claim | None:
        """The first claim in the order of the codes; None if the text has none."""
        text = normalised(text)
        for phrase in self._allowed:
            text = text.replace(phrase, "、")
        patterns = PATTERNS | self._extra if _ANY_WORD.search(text) else self._extra
        for code, (words, pattern) in patterns.items():
            for match in _matches(text, words, pattern):
                if self._is_claim(text, match):
                    return Claim(code, match.group())
        return None

    def _is_claim(self, text: str, match: re.Match[str]) -> bool:
        if not self._questions_count and _asks(_sentence(text, match)):
            return False
        begin = _after_last(text, _CLAUSE_ENDS, match.start())
        return not _is_negated(text[begin : match.start()], match.group())


def normalised(text: str) -> str:
    """NFKC in lower case, without white space other than line feeds: １００％ 有效 gives 100%有效."""
    text = unicodedata.normalize("NFKC", text).lower()
    if "\n" not in text:
        return "".join(text.split())
    return "\n".join("".join(line.split()) for line in text.split("\n"))


def _matches(text: str, words: tuple[str, ...], pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Searches the pattern only near the words, because a regular expression costs thousands of instructions per character."""
    for word in words:
        start = text.find(word)
        while start >= 0:
            yield from pattern.finditer(text, max(0, start - _REACH), start + len(word) + _REACH)
            start = text.find(word, start + len(word))


def _sentence(text: str, match: re.Match[str]) -> str:
    ends = [text.find(end, match.end()) for end in _SENTENCE_ENDS]
    end = min((end for end in ends if end >= 0), default=len(text) - 1)
    return text[_after_last(text, _SENTENCE_ENDS, match.start()) : end + 1]


def _after_last(text: str, ends: str, before: int) -> int:
    return max(text.rfind(end, 0, before) for end in ends) + 1


def _asks(sentence: str) -> bool:
    return any(word in sentence for word in _QUESTIONS)


def _is_negated(before: str, word: str) -> bool:
    if word.startswith("没") and before.endswith("有"):
        return True  # 有没有副作用 is a question
    chain = _NEGATED.search(before[-_LONGEST_NEGATION:])
    # An even number of negations is a claim: 没有不能治愈的.
    return chain is not None and len(_NEGATION.findall(chain.group())) % 2 == 1
