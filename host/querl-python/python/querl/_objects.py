"""`Reward`, `Filter`, `StyleScorer` and `Scorer`. Their methods take lists of dictionaries or tables (see `querl.rows`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from . import _querl
from ._program import check, program
from ._querl import Rejection, Score
from ._rows import rows


_Result = TypeVar("_Result")


def _over_rows(native: Callable[[list[dict[str, Any]]], list[_Result]], table: object) -> list[_Result]:
    """Calls a native method with the rows of a table.

    A list of plain dictionaries is passed without conversion first, because `rows` takes longer than most calls. If the native method
    raises TypeError or ValueError, the call is repeated with the output of `rows`, which removes None, converts values that are
    not JSON, or raises an error that names row and field.
    """
    if type(table) is list and all(type(row) is dict for row in table):
        episodes = [row["episode"] if row.get("format") == 3 and "episode" in row else row for row in table]
        try:
            return native(episodes)
        except (TypeError, ValueError):
            pass
    return native(rows(table))


def _refuse_empty_columns(requests: object) -> None:
    """Raises TypeError for None in `columns`, which `/v1/score` refuses too; `rows` would remove it, as it must for tables."""
    for index, request in enumerate(requests if isinstance(requests, (list, tuple)) else ()):
        query = request.get("query") if isinstance(request, Mapping) else None
        columns = query.get("columns") if isinstance(query, Mapping) else None
        for name, value in columns.items() if isinstance(columns, Mapping) else ():
            if value is None:
                expected = "expected a text, a number, true, false or a list of these; leave the column out"
                raise TypeError(f"row {index}, field `query.columns.{name}`: None; {expected}")


class _Wrapper:
    """Wraps an object of the extension module. It is pickled as constructor arguments; unpickling opens it again."""

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
        """Opens a plugin.

        path: a bundle (`.querl`), a component (`.wasm`) or a folder with the plugin's source code.
        settings, limits: as in the `[plugins]` section of a configuration.
        trusted_keys: public keys. If given, `path` must be a bundle that is signed with one of them.
        digest: SHA-256 of the bundle or component. If given, any other file is refused.
        """
        check(program())
        self._native = self._class(path, settings, limits, trusted_keys, digest)

    @property
    def name(self) -> str:
        """The plugin's name in its manifest (plugin.toml)."""
        return str(self._native.name)

    @property
    def version(self) -> str:
        return str(self._native.version)

    @property
    def digest(self) -> str:
        """SHA-256 of the bundle or component."""
        return str(self._native.digest)


class Reward(_Plugin):
    """A reward plugin without an environment: scores episodes that already contain their retrieval hits and judge scores."""

    _native: _querl.Reward
    _class = _querl.Reward

    def score(self, episodes: object) -> list[Score | Rejection]:
        """Scores episodes. Returns one `Score` or `Rejection` for each episode, in the same order.

        A plugin that scores groups needs all episodes with the same `group_id` in one call.

        episodes: dictionaries with the fields of `episode` in docs/files.md#episodesjsonl, or a table (see `querl.rows`).
        """
        return _over_rows(self._native.score, episodes)

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest total that the plugin declares."""
        return self._native.range

    @property
    def inputs(self) -> dict[str, str]:
        """The episode inputs that the plugin reads: `{"retrieval": "required", "judgement": "optional"}`."""
        return self._native.inputs


class Filter(_Plugin):
    """A filter plugin: decides which rows stay in the training data."""

    _native: _querl.Filter
    _class = _querl.Filter

    def check(self, samples: object) -> list[Rejection | None]:
        """Checks samples. Returns None for each sample that is kept and a `Rejection` for each that is dropped, in the same order.

        Pass all rows of a split in one call: a filter may compare rows, for example to remove duplicates.
        """
        return _over_rows(self._native.check, samples)


class StyleScorer(_Plugin):
    """A style scorer plugin: scores the style of the assistant's last turn in a dialogue."""

    _native: _querl.StyleScorer
    _class = _querl.StyleScorer

    def score(self, dialogues: object) -> list[Score | Rejection]:
        """Scores dialogues `{"id", "turns": [{"role", "content"}]}`. Returns one `Score` (0 to 1) or `Rejection` for each, in order."""
        return _over_rows(self._native.score, dialogues)


class Scorer(_Wrapper):
    """The RL environment of a configuration or a run.

    As in training, it parses the rewrite from each response, retrieves passages for it, calls the judge, and computes the
    weighted sum of the reward plugins.

    config: a `querl.toml` or a run directory.
    overrides: `KEY=VALUE`, as for `--set` of the command line.

    A `Scorer` can be pickled, shared by threads, and used after a fork. Exception: with local models (style, embedding
    or reranker) it cannot be used after a fork; start workers with the method `spawn` or `forkserver`.
    """

    _native: _querl.Scorer

    def __init__(
        self, config: str | os.PathLike[str], overrides: list[str] | None = None, digests: list[str] | None = None
    ) -> None:
        """`digests`: SHA-256 of the configuration's plugins, in its order. If given, other plugins are refused. Set by unpickling."""
        check(program())
        self._native = _querl.Scorer(config, overrides, digests)

    def score(self, requests: object) -> list[Score | Rejection]:
        """Scores responses. Returns one `Score` or `Rejection` for each request, in the same order.

        Blocks until retrieval, judge and plugins have finished; releases the GIL meanwhile. Rewards that score groups need
        all requests with the same `group_id` in one call.

        A request is a dictionary. All keys but the first two are optional:

        query: id of a query of the run; or `{"query", "user_profile"?, "history_summary"?, "gold_ids"?, "columns"?,
            "baseline"?, "expansion"?}`, as a dictionary or as JSON text. A value of `columns` is a text, a number, true, false or a list of
            these; None is refused, and in a table it is a missing cell.
        response: text that the policy generated.
        truncated: True if the token limit ended the response.
        n_tokens: number of generated tokens.
        prompt: messages `[{"role", "content"}]` that the policy got.
        step: training step, from 0.
        group_id: the same for all samples of one query in one batch.
        sample_index: index of the response in its group, from 0.
        """
        _refuse_empty_columns(requests)
        return _over_rows(self._native.score, requests)

    async def score_async(self, requests: object) -> list[Score | Rejection]:
        """Runs `score` in the thread pool of the event loop."""
        return await asyncio.to_thread(self.score, requests)

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest possible total: the weighted sum of the reward plugins."""
        return self._native.range

    @property
    def tenant(self) -> str:
        return self._native.tenant
