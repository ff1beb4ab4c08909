"""The interface `style-scores`."""

from __future__ import annotations

from componentize_py_types import Err
from wit_world.exports import style_scores as wit
from wit_world.imports import style_model

from ..registry import exported
from ..style import ClassifyError, Dialogue
from ..types import Message, Rejection, StyleProbability
from . import convert, host


class StyleScores:
    def score_batch(self, dialogues):
        plugin = exported().style_scorer(host.settings())
        return [_scored(plugin, _dialogue(dialogue)) for dialogue in dialogues]


def _dialogue(value) -> Dialogue:
    return Dialogue(value.id, [convert.message_in(turn) for turn in value.turns])


def _scored(plugin, dialogue: Dialogue):
    try:
        score = plugin.score(dialogue, _HostModel())
    except Rejection as rejection:
        return convert.rejected(rejection)
    return convert.scored(score, wit.StyleScore, wit.Component)


class _HostModel:
    """The style model that the host holds."""

    def classify(self, turns: list[Message]) -> list[StyleProbability]:
        try:
            return style_model.classify([convert.message_out(turn) for turn in turns])
        except Err as error:
            reason = error.value
        if isinstance(reason, style_model.ClassifyError_Failed):
            raise ClassifyError(convert.call_failure(reason.value))
        raise ClassifyError
