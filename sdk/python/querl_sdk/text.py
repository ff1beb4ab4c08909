"""Text functions for plugins: normalisation, Chinese numerals, edit distance, n-gram overlap, repetition, length penalty.

All are pure. The SDKs for Rust and JavaScript have the same functions with bit-identical results, tested with
``sdk/testdata/text.jsonl``.
"""

from __future__ import annotations

import re

# Unicode `White_Space`. `str.split` would also split at U+001C to U+001F.
_BLANKS = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
_HALF_WIDTH: dict[int, int | None] = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_WITHOUT_INVISIBLE: dict[int, int | None] = {**_HALF_WIDTH, 0x200B: None, 0xFEFF: None}
# A run of ASCII letters and digits, or one character that is neither whitespace nor punctuation (ASCII, Latin-1, general, CJK, vertical).
_UNIT = re.compile(
    "[0-9a-z]+|[^\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e \xa1\xa7\xab\xb6\xb7\xbb\xbf"
    "\u2000-\u206f\u3000-\u3003\u3008-\u3011\u3014-\u301f\u3030\ufe30-\ufe4f\uff5f-\uff65]"
)
_DIGITS = {character: value for value, text in enumerate(["0〇零", "1一壹", "2二两贰", "3三叁", "4四肆", "5五伍", "6六陆", "7七柒", "8八捌", "9九玖"]) for character in text}
_UNITS = {"十": 10, "拾": 10, "百": 100, "佰": 100, "千": 1000, "仟": 1000, "万": 10_000, "亿": 100_000_000}
_NUMBER_SIGNS = {*_DIGITS, *_UNITS, *".-点负分之"}
_DECIMAL = re.compile(r"([0-9]+(?:\.[0-9]+)?)([万亿]*)")
_END = 2.0**53  # integers below it are exact


def normalise(text: str) -> str:
    """Normalises a text: a subset of Unicode's NFKC, in lower case.

    Converts full-width forms (U+FF01 to U+FF5E) to ASCII and letters to lower case, removes U+200B and U+FEFF, collapses runs of
    whitespace to one space, and strips both ends.
    """
    text = text.translate(_WITHOUT_INVISIBLE)
    # `str.lower` on a string converts a final Σ to ς. The other SDKs convert code points one by one, so do the same here.
    lowered = "".join(map(str.lower, text)) if "Σ" in text else text.lower()
    return _BLANKS.sub(" ", lowered).strip(" ")


def units(text: str) -> list[str]:
    """The units of the normalised text: each run of ASCII letters and digits, and each other character. Whitespace and punctuation are
    dropped."""
    return _UNIT.findall(normalise(text))


def number(text: str) -> float | None:
    """Parses a text that is one number: ``三百二十``, ``一万零五``, ``两千三`` (2300), ``二〇二四`` (2024), ``三点五``, ``3.5万``, ``１２``,
    ``负二``, ``百分之五`` (0.05). ``None`` for any other text and for values of 2^53 or more."""
    return _value(text.translate(_HALF_WIDTH))


def numbers(text: str) -> list[float]:
    """Finds all numbers in a text, in order. At each position the longest number of at most 32 characters is taken: ``一万零五`` is one
    number. Numerals within words (``一起``) are found too."""
    text, values, start = text.translate(_HALF_WIDTH), [], 0
    while start < len(text):
        end = start
        while end < min(len(text), start + 32) and text[end] in _NUMBER_SIGNS:
            end += 1
        found = next(((stop, value) for stop in range(end, start, -1) if (value := _value(text[start:stop])) is not None), None)
        if found is None:
            start += 1
        else:
            start = found[0]
            values.append(found[1])
    return values


def _value(text: str) -> float | None:
    unsigned = text.removeprefix("负") if text.startswith("负") else text.removeprefix("-")
    rest = unsigned.removeprefix("百分之")
    value = _unsigned(rest)
    if value is not None and rest != unsigned:
        value /= 100
    if value is None or value >= _END:
        return None
    return value if unsigned == text else -value


def _unsigned(text: str) -> float | None:
    if text[:1] in "0123456789." and text:
        found = _DECIMAL.fullmatch(text)
        if found is None:
            return None
        value = float(found[1])
        for unit in found[2]:
            value *= _UNITS[unit]
        return value
    whole, point, fraction = text.partition("点")
    value = _whole(whole)
    if not point or value is None:
        return value
    digits = [str(_DIGITS.get(character, "")) for character in fraction]
    return float(f"{value:.0f}.{''.join(digits)}") if digits and all(digits) else None


def _whole(text: str) -> float | None:
    """An integer in Chinese numerals."""
    if text and all(character in _DIGITS for character in text):
        value = 0.0
        for character in text:
            value = value * 10 + _DIGITS[character]
        return value
    # `total`: the value of the sections before, each ended by 万 or 亿. `section`: the current section, below 10,000. `pending`: a digit
    # whose unit has not been read.
    total, section, pending = 0.0, 0.0, None
    # `before`: the previous unit; a final digit directly after it counts tenths of it (两千三 is 2300). `below`: units within the section
    # must be smaller than this, since they descend.
    before, below = 1, 10_000
    for index, character in enumerate(text):
        digit, unit = _DIGITS.get(character), _UNITS.get(character, 0)
        if digit is not None and pending is None and (digit > 0 or index > 0):
            if digit == 0:
                before = 1
            else:
                pending = digit
        elif 0 < unit < below and unit < 10_000:
            if pending is None and not (unit == 10 and index == 0):
                return None
            section += (1 if pending is None else pending) * unit
            pending, before, below = None, unit, unit
        elif unit >= 10_000:
            section += pending or 0
            pending = None
            closed = total + section
            if closed == 0 or (unit == 10_000 and total > 0 and section == 0):
                return None
            # 亿 multiplies everything before it, 万 only the section.
            total = total + section * unit if unit == 10_000 else closed * unit
            section, before, below = 0.0, unit, 10_000
        else:
            return None
    last = (pending or 0) * (before / 10 if before >= 100 else 1)
    return total + section + last if text else None


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance in code points: the least number of insertions, deletions and substitutions that convert ``a`` to ``b``."""
    row = list(range(len(b) + 1))
    for i, of_a in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, of_b in enumerate(b, 1):
            replaced = diagonal + (of_a != of_b)
            diagonal = row[j]
            row[j] = min(replaced, diagonal + 1, row[j - 1] + 1)
    return row[-1]


def rouge_l(a: str, b: str) -> float:
    """ROUGE-L F1 over :func:`units`: 2 lcs / (n + m), with the length lcs of the longest common subsequence. 0 if a text has no units.

    Chin-Yew Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004, equations 2 to 4 with beta = 1.
    """
    of_a, of_b = units(a), units(b)
    if not of_a or not of_b:
        return 0.0
    row = [0] * (len(of_b) + 1)
    for one in of_a:
        diagonal = 0
        for j, other in enumerate(of_b, 1):
            above = row[j]
            row[j] = diagonal + 1 if one == other else max(above, row[j - 1])
            diagonal = above
    return 2 * row[-1] / (len(of_a) + len(of_b))


def jaccard(a: str, b: str, n: int) -> float:
    """Jaccard similarity of the sets of ``n``-grams over :func:`units`; 0 if both sets are empty. ``n`` is at least 1."""
    of_a, of_b = set(_ngrams(a, n)), set(_ngrams(b, n))
    n_union = len(of_a | of_b)
    return len(of_a & of_b) / n_union if n_union else 0.0


def repetition(text: str, n: int) -> float:
    """Share of repeated ``n``-grams over :func:`units`, 0 to 1: 1 - distinct / all. 0 without ``n``-grams. ``n`` is at least 1.

    seq-rep-n of Welleck et al., "Neural Text Generation with Unlikelihood Training", 2020, equation 11.
    """
    ngrams = _ngrams(text, n)
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def soft_overlong(length: int, max_length: int, buffer: int) -> float:
    """Soft overlong penalty, -1 to 0: 0 up to ``max_length - buffer``, then linear to -1 at ``max_length``, and -1 above. ``buffer`` is at
    most ``max_length``. The three arguments have the same unit, for example tokens or characters.

    Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, equation 13.
    """
    free = max(max_length - buffer, 0)
    if length <= free:
        return 0.0
    return (free - length) / buffer if length <= max_length else -1.0


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    of_text = units(text)
    return [tuple(of_text[start : start + n]) for start in range(len(of_text) - n + 1)]
