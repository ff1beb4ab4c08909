"""The interfaces `rewards` and `group-rewards`, and `json-rewards`, which gives the same results."""

from __future__ import annotations

from json.encoder import encode_basestring as quoted

from componentize_py_types import Err, Ok
from wit_world.imports import types as wit

from ..description import range_of
from ..registry import exported
from ..reward import Score
from ..types import Episode, Rejection
from . import convert, host, json_episodes
from .errors import explained


@explained
class Rewards:
    def range(self):
        return _range("reward")

    def score_batch(self, episodes):
        plugin = exported()["reward"](host.settings())
        return [_result(_scored(plugin, convert.episode(value)), "score") for value in episodes]


@explained
class GroupRewards:
    def range(self):
        return _range("group-reward")

    def score_group(self, episodes):
        return [_result(outcome, "score_group") for outcome in _scored_group([convert.episode(value) for value in episodes])]


@explained
class JsonRewards:
    def score_json(self, episodes):
        plugin = exported().get("reward") or exported()["group-reward"]
        read = json_episodes.reader((*plugin.requires, *plugin.uses))
        if "reward" not in exported():
            outcomes = _scored_group(list(read(episodes)))
            return f"[{','.join([_written(outcome, 'score_group') for outcome in outcomes])}]"
        score, written = plugin(host.settings()).score, []
        for episode in read(episodes):
            try:
                outcome = score(episode)
            except Rejection as rejection:
                outcome = rejection
            written.append(_written(outcome, "score"))
        return f"[{','.join(written)}]"


def _range(kind: str):
    return wit.Bounds(*range_of(exported()[kind](host.settings())))


def _scored(plugin, episode: Episode):
    try:
        return plugin.score(episode)
    except Rejection as rejection:
        return rejection


def _scored_group(episodes: list[Episode]):
    plugin = exported()["group-reward"](host.settings())
    try:
        outcomes = list(plugin.score_group(episodes))
    except Rejection as rejection:
        return [rejection] * len(episodes)
    if len(outcomes) != len(episodes):
        raise ValueError(f"`score_group` gave {len(outcomes)} results for {len(episodes)} episodes; expected one for each")
    return outcomes


def _result(outcome, place: str):
    return Err(convert.rejection(outcome)) if isinstance(outcome, Rejection) else Ok(convert.score(outcome, place))


def _written(outcome, place: str) -> str:
    if type(outcome) is not Score and isinstance(outcome, Rejection):
        return f'{{"rejected":{{"code":{quoted(outcome.code)},"detail":{quoted(outcome.detail)}}}}}'
    total, components = convert.parts(outcome, place)
    if not components:
        return f'{{"scored":{{"total":{total!r},"components":[]}}}}'
    written = ",".join([f'{{"name":{quoted(name)},"value":{value!r}}}' for name, value in components.items()])
    return f'{{"scored":{{"total":{total!r},"components":[{written}]}}}}'
