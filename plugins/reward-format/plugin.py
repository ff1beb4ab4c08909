"""Reward for the format of the raw response: 1 if it matches a regular expression, or is JSON that is valid by a schema; else 0."""

import json
import re
from functools import cache
from typing import NoReturn

from querl_sdk import Episode, Rejection, Reward, Score, SettingError, Settings, export
from schema import Check, compile_schema

_REWRITE = '{"type": "object", "required": ["rewrite"], "properties": {"rewrite": {"type": "string", "pattern": "\\\\S"}}}'


class Format(Reward):
    requires = ("response",)

    def __init__(self, settings: Settings) -> None:
        self.form = settings.choice("form", "pattern", ["pattern", "json"])
        self.max_chars = settings.integer("max_chars", 2000, minimum=1, maximum=20_000)
        pattern = settings.text("pattern", r"[^\n]*\S[^\n]*")
        schema = settings.text("schema", _REWRITE)
        try:
            self.pattern = _compiled(pattern)
        except re.error as error:
            raise SettingError("pattern", f"expected a regular expression, got `{pattern}`: {error}") from None
        try:
            self.is_valid = _checked_by(schema)
        except (ValueError, RecursionError, re.error) as error:
            raise SettingError("schema", f"expected a JSON schema, got `{schema}`: {error}") from None

    def range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score(self, episode: Episode) -> Score:
        if episode.response is None:
            raise Rejection("response_missing", "the episode has no raw response")
        # Checked before the pattern, because matching costs fuel for each character.
        if len(episode.response) > self.max_chars:
            return Score(0.0, {"too_long": 1.0})
        if self.form == "pattern":
            return Score(float(self.pattern.fullmatch(episode.response) is not None))
        try:
            value = json.loads(episode.response, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return Score(0.0, {"is_json": 0.0})
        return Score(float(self.is_valid(value)), {"is_json": 1.0})


# Cached: the constructor also runs when the component is built, so that the defaults are not compiled in each call.
_compiled = cache(re.compile)


@cache
def _checked_by(schema: str) -> Check:
    return compile_schema(json.loads(schema))


def _refuse(constant: str) -> NoReturn:
    """Raises an error for NaN and Infinity, which Python's parser accepts and JSON does not have."""
    raise ValueError(f"{constant} is not JSON")


export(reward=Format)
