"""Plugins and the environment of a configuration, which take tables as well as lists of dictionaries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, TypeVar

from . import _querl
from ._program import check, program
from ._querl import Rejection, Score
from ._rows import rows


_Result = TypeVar("_Result")


def _over_rows(native: Callable[[list[dict[str, Any]]], list[_Result]], table: object) -> list[_Result]:
    """Results of a native method for a table.

    `rows` costs more than most calls: plain dictionaries, also those of lines of `episodes.jsonl`, are passed as they are. If the method
    refuses one, `rows` leaves out None and converts what is not JSON, or names row and field.
    """
    if type(table) is list and all(type(row) is dict for row in table):
        episodes = [row["episode"] if row.get("format") == 3 and "episode" in row else row for row in table]
        try:
            return native(episodes)
        except (TypeError, ValueError):
            pass
    return native(rows(table))


class _Wrapper:
    """Holds an object of the extension module. It is pickled as the arguments that open it again, in any process."""

    _native: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self._native.__reduce__()[1])

    def __repr__(self) -> str:
        return repr(self._native)


class _Plugin(_Wrapper):
    _class: type[Any]

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: dict[str, Any] | None = None,
        limits: dict[str, Any] | None = None,
        trusted_keys: list[str] | None = None,
        digest: str | None = None,
    ) -> None:
        """`path` is a bundle, a component or a source folder; `settings` and `limits` are as in a configuration.

        With `trusted_keys` only bundles that one of them signed are opened; with `digest` only this bundle or
        component.
        """
        check(program())
        self._native = self._class(path, settings, limits, trusted_keys, digest)

    @property
    def name(self) -> str:
        """Id in the manifest."""
        return str(self._native.name)

    @property
    def version(self) -> str:
        return str(self._native.version)

    @property
    def digest(self) -> str:
        """SHA-256 of bundle or component."""
        return str(self._native.digest)


class Reward(_Plugin):
    """A reward plugin without an environment: scores episodes whose hits and judgements are known."""

    _native: _querl.Reward
    _class = _querl.Reward

    def score(self, episodes: object) -> list[Score | Rejection]:
        """One result for each episode, in order. Episodes of one `group_id` must be in one call where the plugin scores
        groups.

        An episode has the form of `episode` in docs/files.md#episodesjsonl; for tables see `querl.rows`.
        """
        return _over_rows(self._native.score, episodes)

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest total."""
        return self._native.range

    @property
    def inputs(self) -> dict[str, str]:
        """What the plugin reads of an episode: `optional` or `required` by name."""
        return self._native.inputs


class Filter(_Plugin):
    """A filter of training data."""

    _native: _querl.Filter
    _class = _querl.Filter

    def check(self, samples: object) -> list[Rejection | None]:
        """None for each sample that is kept. All rows of a split belong in one call: a filter may look for duplicates."""
        return _over_rows(self._native.check, samples)


class StyleScorer(_Plugin):
    """A scorer of the style of answers."""

    _native: _querl.StyleScorer
    _class = _querl.StyleScorer

    def score(self, dialogues: object) -> list[Score | Rejection]:
        """One result for each dialogue `{"id", "turns": [{"role", "content"}]}`, in order."""
        return _over_rows(self._native.score, dialogues)


class Scorer(_Wrapper):
    """The environment of a configuration or a run: parses responses, looks them up, judges and scores them as in training.

    `config` is a `querl.toml` or a run directory, `overrides` are `KEY=VALUE` as of `--set`. An object may be pickled,
    and used after a fork and by several threads. With local models (of style, retrieval or reranking) it cannot be used
    after a fork: start workers with the method `spawn` or `forkserver`.
    """

    _native: _querl.Scorer

    def __init__(
        self, config: str | os.PathLike[str], overrides: list[str] | None = None, digests: list[str] | None = None
    ) -> None:
        """With `digests` only these plugins of the configuration are opened, in its order: a pickled object has them."""
        check(program())
        self._native = _querl.Scorer(config, overrides, digests)

    def score(self, requests: object) -> list[Score | Rejection]:
        """One result for each request, in order. Blocks on services, without the GIL.

        A request is `{"query", "response", "truncated"?, "n_tokens"?, "prompt"?, "step"?, "group_id"?,
        "sample_index"?}`. `query` is the id of a query of the run, or `{"query", "user_profile"?, "history_summary"?,
        "gold_ids"?, "columns"?, "baseline"?}` as a dictionary or its JSON.
        """
        return _over_rows(self._native.score, requests)

    async def score_async(self, requests: object) -> list[Score | Rejection]:
        """`score` in a thread of the event loop's pool."""
        return await asyncio.to_thread(self.score, requests)

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest total: the weighted sum over all rewards."""
        return self._native.range

    @property
    def tenant(self) -> str:
        return self._native.tenant
