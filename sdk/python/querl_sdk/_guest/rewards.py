"""The interface `rewards`."""

from __future__ import annotations

from wit_world.exports import rewards as wit

from ..registry import exported
from ..reward import Episode
from ..types import Rejection
from . import convert, host


class Rewards:
    def range(self):
        low, high = exported().reward(host.settings()).range()
        return wit.Bounds(float(low), float(high))

    def score_batch(self, episodes):
        plugin = exported().reward(host.settings())
        return [_scored(plugin, _episode(episode)) for episode in episodes]


def _episode(value) -> Episode:
    return Episode(
        value.id,
        value.query,
        value.context,
        value.gold_ids,
        convert.candidate(value.policy),
        convert.candidate(value.baseline),
    )


def _scored(plugin, episode: Episode):
    try:
        score = plugin.score(episode)
    except Rejection as rejection:
        return convert.rejected(rejection)
    return convert.scored(score, wit.Score, wit.Component)
