"""The interfaces `rewards` and `group-rewards`, and `json-rewards`, which gives the same results."""

from __future__ import annotations

from dataclasses import fields
from json import JSONDecoder
from json.encoder import encode_basestring as quoted

from componentize_py_types import Err, Ok
from wit_world.imports import types as wit

from ..registry import exported
from ..reward import Score
from ..types import Episode, Rejection
from . import convert, host
from .errors import explained

_decode_at = JSONDecoder().scan_once
_new = object.__new__
# Inputs whose JSON has objects in lists, or names that the user gave.
_NESTED = {"prompt", "columns", "retrieval", "style"}
_MARKS = {field.name: f'"{field.name}":' for field in fields(Episode)}


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
        read = _whole if _NESTED.intersection((*plugin.requires, *plugin.uses)) else _flat
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
    low, high = exported()[kind](host.settings()).range()
    return wit.Bounds(float(low), float(high))


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


def _whole(text: str):
    """The episodes of a JSON array without white space, one by one: what an episode needed is free before the next is read. Memory that
    a call touches first is what costs it most, since each call has a fresh instance."""
    position, end = 0, len(text) - 1
    while position < end and end > 1:
        episode = _new(Episode)
        episode._json, position = _decode_at(text, position + 1)
        yield episode


def _flat(text: str):
    """The same for a plugin without nested inputs: each field is parsed when it is read."""
    pieces = text[3:-2].split('},{"')
    # Only episodes are objects in a list here, and each begins with a name. A text that ends with `},{` is followed by no letter.
    if not "".join([piece[:1] for piece in pieces]).isalpha():
        yield from _whole(text)
        return
    for piece in pieces:
        episode = _new(Episode)
        episode._json = _Fields('"' + piece)
        yield episode


class _Fields:
    """The fields of an episode without nested inputs, as the JSON object that it stands for.

    A name in quotes before a colon is a name of JSON, since quotes in texts are escaped, and no inner object has a name of the episode's.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def get(self, name: str):
        mark = _MARKS[name]
        found = self.text.find(mark)
        return None if found < 0 else _decode_at(self.text, found + len(mark))[0]

    __getitem__ = get


def _written(outcome, place: str) -> str:
    if type(outcome) is not Score and isinstance(outcome, Rejection):
        return f'{{"rejected":{{"code":{quoted(outcome.code)},"detail":{quoted(outcome.detail)}}}}}'
    total, components = convert.parts(outcome, place)
    if not components:
        return f'{{"scored":{{"total":{total!r},"components":[]}}}}'
    written = ",".join([f'{{"name":{quoted(name)},"value":{value!r}}}' for name, value in components.items()])
    return f'{{"scored":{{"total":{total!r},"components":[{written}]}}}}'
