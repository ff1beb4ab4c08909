"""The interface `style-scores`."""

from __future__ import annotations

from componentize_py_types import Err, Ok

from .. import host as host_functions
from ..registry import exported
from ..style import Dialogue
from ..types import Rejection
from . import convert, host
from .errors import explained


@explained
class StyleScores:
    def score_batch(self, dialogues):
        plugin = exported()["style-scorer"](host.settings())
        return [_scored(plugin, _dialogue(dialogue)) for dialogue in dialogues]


def _dialogue(value) -> Dialogue:
    return Dialogue(value.id, [convert.message_in(turn) for turn in value.turns])


def _scored(plugin, dialogue: Dialogue):
    try:
        score = plugin.score(dialogue, host_functions)
    except Rejection as rejection:
        return Err(convert.rejection(rejection))
    return Ok(convert.score(score, "score"))
