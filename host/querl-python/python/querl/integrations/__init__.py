"""Reward functions for other training engines, built on `querl.Scorer`: one module per engine, with shared helpers here.

The configuration (a `querl.toml` or a run directory) is the argument `config`, else the environment variable
QUERL_CONFIG. Each process opens one `Scorer` per configuration.

Each row of the engine's dataset identifies its query in the column `querl`: the id of a query of the run, or
`{"query", "user_profile"?, "history_summary"?, "gold_ids"?, "columns"?, "baseline"?, "expansion"?}` as JSON text.

A rejection is not a score. If the engine can exclude a sample from the update, the reward function does so; otherwise it
raises `SampleRejected`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from .._errors import SampleRejected
from .._objects import Scorer
from .._querl import QuerlError, Rejection, Score

CONFIG_VARIABLE = "QUERL_CONFIG"

#: Number of rejections in this process, by code.
rejections: Counter[str] = Counter()


class ScorerLike(Protocol):
    """A `querl.Scorer`, or any object with its method `score`."""

    def score(self, requests: list[dict[str, Any]], /) -> list[Score | Rejection]: ...


Config = str | os.PathLike[str] | ScorerLike | None

_scorers: dict[str, Scorer] = {}
_opening = threading.Lock()


def _renew_lock() -> None:
    """Replaces the lock in a forked child: a thread of the parent, which the child does not have, may hold it."""
    global _opening
    _opening = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)


def config_path(config: str | os.PathLike[str] | None = None) -> str:
    """Absolute path of `config`, else of QUERL_CONFIG. Absolute, because a worker may have another working directory."""
    path = config or os.environ.get(CONFIG_VARIABLE)
    if not path:
        raise QuerlError(f"no configuration; expected the argument `config` or the environment variable {CONFIG_VARIABLE}")
    return os.path.abspath(path)


def open_scorer(config: Config = None) -> ScorerLike:
    """Returns `config` if it is a scorer already, else the process-wide `Scorer` of this configuration."""
    if config is not None and not isinstance(config, (str, os.PathLike)):
        return config
    name = config_path(config)
    with _opening:
        if name not in _scorers:
            _scorers[name] = Scorer(name)
        return _scorers[name]


def label_of(row: Mapping[str, Any]) -> Any:
    """The query of a dataset row, for the key `query` of a request.

    Taken from the column `querl`; else from `metadata["id"]` (datasets that querl wrote); else from the columns with the
    query and its context.
    """
    label = row.get("querl")
    if isinstance(label, Mapping) and isinstance(label.get("columns"), Mapping):
        # Datasets add the columns of other rows, as None.
        columns = {name: value for name, value in label["columns"].items() if value is not None}
        return {**label, "columns": columns}
    if label is not None and label != "":
        return label
    metadata = row.get("metadata")
    if isinstance(metadata, Mapping) and metadata.get("id"):
        return metadata["id"]
    query = row.get("original_query") or row.get("query")
    if not query:
        names = ", ".join(sorted(row)) or "none"
        raise QuerlError(f"the row names no query; expected a column `querl`, `original_query` or `query`; its columns: {names}")
    context = {name: row.get(name) for name in ("user_profile", "history_summary", "gold_ids", "baseline", "expansion")}
    return {"query": query, **{name: value for name, value in context.items() if value is not None}}


def label_key(label: Any) -> str:
    """A hashable key that is equal for labels of the same query."""
    return label if isinstance(label, str) else json.dumps(label, sort_keys=True, ensure_ascii=False, default=str)


def sample_indices(labels: Sequence[Any]) -> list[int]:
    """For each label, the number of earlier labels with the same query: the index of the sample in its group."""
    seen: Counter[str] = Counter()
    indices = []
    for label in labels:
        key = label_key(label)
        indices.append(seen[key])
        seen[key] += 1
    return indices


def text_of(completion: Any) -> str:
    """The text of a completion: a string, or the last assistant message of a list of messages."""
    if isinstance(completion, str):
        return completion
    messages = [message for message in completion if message.get("role") == "assistant"]
    return content_text(messages[-1].get("content")) if messages else ""


def content_text(content: Any) -> str:
    """The text of a message's content: a string, or a list of parts `{"text"}`, which are concatenated."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def messages_of(prompt: Any) -> list[dict[str, str]] | None:
    """The messages of a conversational prompt; None for a prompt that is a string."""
    if prompt is None or isinstance(prompt, str):
        return None
    return [{"role": message["role"], "content": content_text(message.get("content"))} for message in prompt]


def request(
    label: Any,
    response: str,
    *,
    prompt: Any = None,
    step: int | None = None,
    sample_index: int = 0,
    n_tokens: int = 0,
    truncated: bool = False,
) -> dict[str, Any]:
    """A request for `Scorer.score`. `prompt`: the messages that the policy got; a prompt that is a string is left out."""
    return {
        "query": label,
        "response": response,
        "prompt": messages_of(prompt),
        "step": step,
        "sample_index": sample_index,
        "n_tokens": n_tokens,
        "truncated": truncated,
    }


def total_of(result: Score | Rejection) -> float | None:
    """The total of a score; None for a rejection. Counts the rejection in `rejections`."""
    if isinstance(result, Score):
        return result.total
    rejections[result.code] += 1
    return None


def total_or_raise(result: Score | Rejection) -> float:
    """The total of a score. Raises SampleRejected for a rejection and counts it in `rejections`."""
    if isinstance(result, Score):
        return result.total
    rejections[result.code] += 1
    raise SampleRejected.of(result)


class MicroBatcher:
    """Dynamic batching: collects the requests of an event loop for `window_ms`, or until there are `max_batch`, and scores
    them in one call, in a thread.

    With `group_size` above 1, the requests of one group are held until the group is complete, at most `group_timeout_ms`, and
    are scored in the same call. Rewards that score groups need this.
    """

    def __init__(
        self,
        scorer: ScorerLike,
        window_ms: float = 5.0,
        max_batch: int = 64,
        group_size: int = 1,
        group_timeout_ms: float = 60_000.0,
    ) -> None:
        self.scorer = scorer
        self.window_ms = window_ms
        self.max_batch = max_batch
        self.group_size = group_size
        self.group_timeout_ms = group_timeout_ms
        #: Queued requests by event loop: a batcher may be used by event loops in several threads.
        self._waiting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waiting] = weakref.WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    async def score(self, request: dict[str, Any], group: Hashable = None) -> Score | Rejection:
        """Scores one request. Raises only errors of this request or its group, not those of other requests in the batch."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting.setdefault(loop, _Waiting())
        result: asyncio.Future[Score | Rejection] = loop.create_future()
        if self.group_size > 1 and group is not None:
            self._wait_for_group(loop, waiting, group, _Entry(request, result, group))
        else:
            self._add(loop, waiting, [_Entry(request, result)])
        return await result

    def _wait_for_group(self, loop: asyncio.AbstractEventLoop, waiting: _Waiting, group: Hashable, entry: _Entry) -> None:
        if group not in waiting.groups:
            waiting.groups[group] = queue = _Queue()
            queue.timer = loop.call_later(self.group_timeout_ms / 1000, self._end_group, loop, waiting, group)
        waiting.groups[group].entries.append(entry)
        if len(waiting.groups[group].entries) >= self.group_size:
            self._end_group(loop, waiting, group)

    def _end_group(self, loop: asyncio.AbstractEventLoop, waiting: _Waiting, group: Hashable) -> None:
        self._add(loop, waiting, waiting.groups.pop(group).take())

    def _add(self, loop: asyncio.AbstractEventLoop, waiting: _Waiting, entries: list[_Entry]) -> None:
        waiting.ready.entries.extend(entries)
        if len(waiting.ready.entries) >= self.max_batch:
            self._flush(loop, waiting.ready)
        elif waiting.ready.timer is None:
            waiting.ready.timer = loop.call_later(self.window_ms / 1000, self._flush, loop, waiting.ready)

    def _flush(self, loop: asyncio.AbstractEventLoop, queue: _Queue) -> None:
        task = loop.create_task(self._call(queue.take()))
        # An event loop keeps only weak references to its tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, entries: list[_Entry]) -> None:
        try:
            results = await asyncio.to_thread(self.scorer.score, [entry.request for entry in entries])
        except Exception as error:  # raised in the callers of `score`
            parts = _parts(entries)
            if len(parts) > 1 and isinstance(error, (QuerlError, TypeError, ValueError)):
                # One invalid request, for example with an unknown label, fails the call. Scoring each part alone isolates it.
                await asyncio.gather(*[self._call(part) for part in parts])
                return
            for entry in entries:
                if not entry.result.done():
                    entry.result.set_exception(error)
            return
        for entry, value in zip(entries, results, strict=True):
            if not entry.result.done():
                entry.result.set_result(value)


@dataclasses.dataclass
class _Entry:
    """A queued request with its future, and its group if requests of a group are scored together."""

    request: dict[str, Any]
    result: asyncio.Future[Score | Rejection]
    group: Hashable = None


def _parts(entries: list[_Entry]) -> list[list[_Entry]]:
    """Splits a batch into its smallest independent parts: single entries, and complete groups."""
    groups: dict[Hashable, list[_Entry]] = {}
    for position, entry in enumerate(entries):
        key = ("", position) if entry.group is None else ("group", entry.group)
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


class _Queue:
    """Queued requests, and the timer that sends them."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.timer: asyncio.TimerHandle | None = None

    def take(self) -> list[_Entry]:
        if self.timer is not None:
            self.timer.cancel()
        entries, self.entries, self.timer = self.entries, [], None
        return entries


class _Waiting:
    """Queued requests of one event loop: those of the next call, and incomplete groups."""

    def __init__(self) -> None:
        self.ready = _Queue()
        self.groups: dict[Hashable, _Queue] = {}
