"""The user's settings of a plugin, and typed readers for them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_N = TypeVar("_N", int, float)
_V = TypeVar("_V")


class SettingError(Exception):
    """An invalid setting. ``message`` says what was expected and what was given."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(key, message)
        self.key = key
        self.message = message

    def __str__(self) -> str:
        return f"setting `{self.key}`: {self.message}"


@dataclass(slots=True)
class SettingSpec:
    """A setting that a plugin reads, as reported by ``info.describe``."""

    key: str
    value_type: str
    """``text``, ``number``, ``integer``, ``flag`` or ``texts``."""
    default: str | None = None
    """The default as text; ``None`` if the user must set a value."""
    minimum: float | None = None
    maximum: float | None = None
    choices: list[str] | None = None


class Settings:
    """The user's settings of the plugin, stored as text.

    In a component they come from the host; in a test pass them: ``Settings({"max_chars": 10})``. A reader without a default raises
    :class:`SettingError` if the user set no value.
    """

    def __init__(self, values: Mapping[str, object] | None = None) -> None:
        texts = {key: _as_text(value) for key, value in (values or {}).items()}
        self._get: Callable[[str], str | None] = texts.get
        self._recorded: list[SettingSpec] | None = None

    @classmethod
    def from_source(cls, get: Callable[[str], str | None]) -> Settings:
        """Settings that are looked up with ``get`` when they are read."""
        settings = cls.__new__(cls)
        settings._get, settings._recorded = get, None
        return settings

    @classmethod
    def recording(cls, into: list[SettingSpec]) -> Settings:
        """Empty settings that append every read to ``into``. A reader without a default returns some valid value."""
        settings = cls()
        settings._recorded = into
        return settings

    def get(self, key: str) -> str | None:
        """The text of ``key``; ``None`` if the user set no value. The description has an empty text as default."""
        self._record(key, "text", "")
        return self._get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """The text of ``key``, or ``default``."""
        self._record(key, "text", default)
        text = self._get(key)
        return self._absent(key, "a text", default, "") if text is None else text

    def choice(self, key: str, default: str | None, choices: Sequence[str]) -> str:
        """The value of ``key``, one of ``choices``, or ``default``. Raises :class:`SettingError` for any other text."""
        self._record(key, "text", default, choices=list(choices))
        text = self._get(key)
        if text in choices:
            return text
        names = "one of " + ", ".join(f"`{choice}`" for choice in choices)
        if text is None:
            return self._absent(key, names, default, choices[0])
        raise SettingError(key, f"expected {names}, got `{text}`")

    def number(self, key: str, default: float | None = None, minimum: float = -math.inf, maximum: float = math.inf) -> float:
        """The number of ``key``, or ``default``. Raises :class:`SettingError` outside of ``minimum`` to ``maximum`` (inclusive)."""
        return self._number(float, key, "number", default, minimum, maximum)

    def integer(self, key: str, default: int | None = None, minimum: int | None = None, maximum: int | None = None) -> int:
        """The integer of ``key``, or ``default``. Raises :class:`SettingError` outside of ``minimum`` to ``maximum`` (inclusive)."""
        low = -math.inf if minimum is None else minimum
        high = math.inf if maximum is None else maximum
        return self._number(int, key, "integer", default, low, high)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """The boolean of ``key``, or ``default``. Raises :class:`SettingError` for anything but true and false."""
        self._record(key, "flag", default)
        text = self._get(key)
        if text is None:
            return self._absent(key, "true or false", default, False)
        if text not in ("true", "false"):
            raise SettingError(key, f"expected true or false, got `{text}`")
        return text == "true"

    def texts(self, key: str, default: Sequence[str] | None = ()) -> list[str]:
        """The list of strings of ``key``, or ``default``. Raises :class:`SettingError` for anything else."""
        self._record(key, "texts", None if default is None else list(default))
        text = self._get(key)
        if text is None:
            return list(self._absent(key, "a list of texts", default, ()))
        try:
            texts = json.loads(text)
        except ValueError:
            texts = None
        if not isinstance(texts, list) or not all(isinstance(entry, str) for entry in texts):
            raise SettingError(key, f"expected a list of texts, got `{text}`")
        return texts

    def _number(self, read: Callable[[str], _N], key: str, value_type: str, default: _N | None, low: float, high: float) -> _N:
        self._record(key, value_type, default, low, high)
        text = self._get(key)
        if text is None and default is not None:
            return default
        number = None if text is None else _parsed(read, text)
        if number is not None and math.isfinite(number) and low <= number <= high:
            return number
        expected = f"a {'whole number' if value_type == 'integer' else 'number'}{_bounds(low, high)}"
        if text is None:
            usable = next((bound for bound in (low, high) if math.isfinite(bound)), 0)
            return self._absent(key, expected, default, type(read("0"))(usable))
        raise SettingError(key, f"expected {expected}, got `{text}`")

    def _absent(self, key: str, expected: str, default: _V | None, usable: _V) -> _V:
        """The default. Without one: ``usable`` while reads are recorded, else :class:`SettingError`."""
        if default is not None:
            return default
        if self._recorded is None:
            raise SettingError(key, f"expected {expected}, got nothing; set it")
        return usable

    def _record(
        self,
        key: str,
        value_type: str,
        default: object,
        low: float = -math.inf,
        high: float = math.inf,
        choices: list[str] | None = None,
    ) -> None:
        if self._recorded is None:
            return
        bounds = [float(bound) if math.isfinite(bound) else None for bound in (low, high)]
        text = None if default is None else _as_text(default)
        self._recorded.append(SettingSpec(key, value_type, text, *bounds, choices))


def _as_text(value: object) -> str:
    """The text form that the host uses: strings unchanged, all other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _parsed(read: Callable[[str], _N], text: str) -> _N | None:
    """The number in a text, or None. Refuses underscores (`1_000`), which Python accepts but the host never writes."""
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
