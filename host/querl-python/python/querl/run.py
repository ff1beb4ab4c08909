"""Reads the results in a run directory. docs/files.md describes the files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from ._figures import figures
from ._querl import QuerlError, load_config

Form = Literal["pandas", "arrow"]


class Run:
    """A run directory, finished or in progress. Nothing is cached: every call reads the files."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not (self.directory / "config.resolved.toml").is_file():
            raise QuerlError(f"{self.directory}: no run directory; expected one with config.resolved.toml")

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration: every key with its value, defaults included."""
        return load_config(self.directory, [])

    def episodes(self, as_: Form | None = None) -> Any:
        """The lines of `episodes.jsonl`, in order, as a list of dictionaries, a pandas DataFrame or a pyarrow Table.

        Each of these can be passed to `Reward.score`.
        """
        return _as(_lines(self.directory / "episodes.jsonl"), as_)

    def metrics(self, as_: Form | None = None) -> Any:
        """The lines of `metrics.jsonl`: `stage`, `step`, and one key for each metric."""
        return _as(_lines(self.directory / "metrics.jsonl"), as_)

    def figures(self, as_: Form | None = None) -> Any:
        """The metrics of `eval.json`, one row for each metric of a system or a pair.

        Keys: `of` (a system such as `rl`, or a pair such as `rl-sft`), `metric`, `mean`, `low` and `high` (95% interval); for
        pairs also `n`, the number of compared queries. Metrics without a value are left out.
        """
        return _as(figures(self.evaluation), as_)

    @property
    def evaluation(self) -> dict[str, Any]:
        """The content of `eval.json`; empty before the stage `eval` has finished."""
        path = self.directory / "eval.json"
        if not path.is_file():
            return {}
        evaluation: dict[str, Any] = json.loads(path.read_bytes())
        return evaluation


def _as(records: list[dict[str, Any]], form: Form | None) -> Any:
    if form is None:
        return records
    if form == "pandas":
        import pandas

        return pandas.DataFrame(records)
    if form == "arrow":
        import pyarrow

        return pyarrow.Table.from_pylist(records)
    raise ValueError(f"as_ is {form!r}; expected 'pandas', 'arrow' or None")


def _lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; empty if the file is missing. An incomplete last line (the writer was killed) is skipped."""
    if not path.is_file():
        return []
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                records.append(json.loads(line))
            except ValueError as error:
                if not line.endswith(b"\n"):
                    break
                raise QuerlError(f"{path}:{number}: not JSON: {error}") from None
    return records
