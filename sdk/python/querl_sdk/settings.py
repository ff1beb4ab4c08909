"""What the user set for this plugin."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

_N = TypeVar("_N", int, float)


class SettingError(Exception):
    """What is wrong with a setting: ``message`` says what was expected and what came."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(key, message)
        self.key = key
        self.message = message

    def __str__(self) -> str:
        return f"setting `{self.key}`: {self.message}"


class Settings:
    """The user's settings for this plugin, each a text.

    In a component they come from the host; in a test they are given: ``Settings({"max_chars": 10})``.
    """

    def __init__(self, values: Mapping[str, object] | None = None) -> None:
        texts = {key: _as_text(value) for key, value in (values or {}).items()}
        self._get: Callable[[str], str | None] = texts.get

    @classmethod
    def from_source(cls, get: Callable[[str], str | None]) -> Settings:
        """Settings that are asked for one by one."""
        settings = cls()
        settings._get = get
        return settings

    def get(self, key: str) -> str | None:
        """The text under ``key``; ``None`` where the user set nothing."""
        return self._get(key)

    def text(self, key: str, default: str) -> str:
        """The text under ``key``, or ``default``."""
        text = self.get(key)
        return default if text is None else text

    def choice(self, key: str, default: str, choices: Sequence[str]) -> str:
        """One of ``choices`` under ``key``, or ``default``. Raises :class:`SettingError` for another text."""
        text = self.text(key, default)
        if text not in choices:
            names = ", ".join(f"`{choice}`" for choice in choices)
            raise SettingError(key, f"expected one of {names}, got `{text}`")
        return text

    def number(self, key: str, default: float, minimum: float = -math.inf, maximum: float = math.inf) -> float:
        """The number under ``key``, or ``default``.

        Raises :class:`SettingError` where it is not a number from ``minimum`` to ``maximum``.
        """
        text = self.get(key)
        if text is None:
            return default
        number = _parsed(float, text)
        if number is None or not math.isfinite(number) or not minimum <= number <= maximum:
            raise SettingError(key, f"expected a number{_bounds(minimum, maximum)}, got `{text}`")
        return number

    def integer(self, key: str, default: int, minimum: int | None = None, maximum: int | None = None) -> int:
        """The whole number under ``key``, or ``default``.

        Raises :class:`SettingError` where it is not a whole number from ``minimum`` to ``maximum``.
        """
        text = self.get(key)
        if text is None:
            return default
        low = -math.inf if minimum is None else minimum
        high = math.inf if maximum is None else maximum
        number = _parsed(int, text)
        if number is None or not low <= number <= high:
            raise SettingError(key, f"expected a whole number{_bounds(low, high)}, got `{text}`")
        return number

    def flag(self, key: str, default: bool) -> bool:
        """The truth value under ``key``, or ``default``. Raises :class:`SettingError` for other than true and false."""
        text = self.get(key)
        if text is None:
            return default
        if text not in ("true", "false"):
            raise SettingError(key, f"expected true or false, got `{text}`")
        return text == "true"

    def texts(self, key: str, default: Sequence[str] = ()) -> list[str]:
        """The list of texts under ``key``, or ``default``. Raises :class:`SettingError` where it is another thing."""
        text = self.get(key)
        if text is None:
            return list(default)
        try:
            texts = json.loads(text)
        except ValueError:
            texts = None
        if not isinstance(texts, list) or not all(isinstance(entry, str) for entry in texts):
            raise SettingError(key, f"expected a list of texts, got `{text}`")
        return texts


def _as_text(value: object) -> str:
    """As the host renders values: texts as they are, the rest as JSON, which numbers and booleans are too."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _parsed(read: Callable[[str], _N], text: str) -> _N | None:
    """Python reads `1_000` as a number; the host never writes one so."""
    try:
        return None if "_" in text else read(text.strip())
    except ValueError:
        return None


def _bounds(minimum: float, maximum: float) -> str:
    match (math.isfinite(minimum), math.isfinite(maximum)):
        case (True, True):
            return f" from {minimum} to {maximum}"
        case (True, False):
            return f" of at least {minimum}"
        case (False, True):
            return f" of at most {maximum}"
    return ""
