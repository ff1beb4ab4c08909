"""The episodes of a batch as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from json import JSONDecoder

from ..types import Episode

_decode_at = JSONDecoder().scan_once
_new = object.__new__
# Inputs whose JSON has objects in lists, or names that the user gave.
_NESTED = {"prompt", "columns", "retrieval", "style"}
_MARKS = {field.name: f'"{field.name}":' for field in fields(Episode)}


def reader(inputs: Iterable[str]) -> Callable[[str], Iterator[Episode]]:
    """What reads the episodes of a plugin that declares these inputs."""
    return flat if _NESTED.isdisjoint(inputs) else whole


def whole(text: str) -> Iterator[Episode]:
    """The episodes of a JSON array without white space, one by one: what an episode needed is free before the next is read. Memory that
    a call touches first is what costs it most, since each call has a fresh instance."""
    position, end = 0, len(text) - 1
    while position < end and end > 1:
        episode = _new(Episode)
        episode._json, position = _decode_at(text, position + 1)
        yield episode


def flat(text: str) -> Iterator[Episode]:
    """The same for a plugin without nested inputs: each field is parsed when it is read."""
    start, last = 2, len(text) - 2
    while start < last:
        # No other object here is in a list, and each begins with a name: after a text that ends with `},{` comes no letter.
        end = text.find('},{"', start)
        while end >= 0 and not text[end + 4].isalpha():
            end = text.find('},{"', end + 4)
        if end < 0:
            end = last
        episode = _new(Episode)
        episode._json = _Fields(text[start:end])
        start = end + 3
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
