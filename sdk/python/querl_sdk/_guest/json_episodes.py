"""Decodes the episodes of a batch from JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from json import JSONDecoder

from ..types import Episode

_decode_at = JSONDecoder().scan_once
_new = object.__new__
# Inputs whose JSON has objects in lists, or user-defined keys.
_NESTED = {"prompt", "columns", "retrieval", "style"}
_MARKS = {field.name: f'"{field.name}":' for field in fields(Episode)}


def reader(inputs: Iterable[str]) -> Callable[[str], Iterator[Episode]]:
    """The decoder for the episodes of a plugin that declares these inputs."""
    return flat if _NESTED.isdisjoint(inputs) else whole


def whole(text: str) -> Iterator[Episode]:
    """Yields the episodes of a JSON array without whitespace. Decodes one episode at a time, so that its memory is reused for the next:
    each call has a new instance, and touching new memory is the largest cost of a call."""
    position, end = 0, len(text) - 1
    while position < end and end > 1:
        episode = _new(Episode)
        episode._json, position = _decode_at(text, position + 1)
        yield episode


def flat(text: str) -> Iterator[Episode]:
    """As `whole`, for a plugin without nested inputs: each field is decoded when it is read."""
    start, last = 2, len(text) - 2
    while start < last:
        # Finds the next `},{"` that is followed by a letter. The episodes are the only objects in a list, and their keys begin with a
        # letter; within a string the quote would end the string, and no letter can follow.
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
    """The JSON text of an episode without nested inputs, with the interface of a dictionary.

    `"NAME":` can only be a key, because quotes within strings are escaped. It is the episode's key, because inner objects have no
    keys of the same name.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def get(self, name: str):
        mark = _MARKS[name]
        found = self.text.find(mark)
        return None if found < 0 else _decode_at(self.text, found + len(mark))[0]

    __getitem__ = get
