"""querl.integrations.MicroBatcher over a scorer that raises an error for some requests."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

querl = pytest.importorskip("querl")
from querl.integrations import MicroBatcher  # noqa: E402


class Refusing:
    """Returns the responses as results. A call that contains the query `bad` fails, as with an unknown id."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def score(self, requests: list[dict[str, Any]]) -> list[Any]:
        self.calls.append([request["query"] for request in requests])
        if "bad" in self.calls[-1]:
            raise querl.QuerlError("query `bad` is not among the rows")
        return [request["response"] for request in requests]


def scored(batcher: MicroBatcher, queries: list[str], groups: list[str | None]) -> list[Any]:
    async def all_of_them() -> list[Any]:
        calls = [batcher.score({"query": query, "response": query}, group) for query, group in zip(queries, groups, strict=True)]
        return await asyncio.gather(*calls, return_exceptions=True)

    return [type(one).__name__ if isinstance(one, Exception) else one for one in asyncio.run(all_of_them())]


def test_a_refused_request_does_not_fail_the_others() -> None:
    scorer = Refusing()
    assert scored(MicroBatcher(scorer), ["a", "bad", "b"], [None] * 3) == ["a", "QuerlError", "b"]
    assert scorer.calls[0] == ["a", "bad", "b"] and sorted(scorer.calls[1:]) == [["a"], ["b"], ["bad"]]


def test_a_group_is_scored_again_as_a_whole() -> None:
    scorer = Refusing()
    found = scored(MicroBatcher(scorer, group_size=2), ["a", "b", "c", "bad"], ["one", "one", "two", "two"])
    assert found == ["a", "b", "QuerlError", "QuerlError"]
    assert sorted(scorer.calls[1:]) == [["a", "b"], ["c", "bad"]]


def test_event_loops_of_two_threads_share_a_batcher() -> None:
    batcher, found, both = MicroBatcher(Refusing(), window_ms=50), {}, threading.Barrier(2)

    def loop(name: str) -> None:
        both.wait(60)
        found[name] = scored(batcher, [f"{name}{index}" for index in range(4)], [None] * 4)

    threads = [threading.Thread(target=loop, args=(name,)) for name in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {name: [f"{name}{index}" for index in range(4)] for name in "xy"}
