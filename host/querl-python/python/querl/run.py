"""Results of a run directory. docs/files.md describes the files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from ._figures import figures
from ._querl import QuerlError, load_config

Form = Literal["pandas", "arrow"]


class Run:
    """A run directory, finished or in progress. Every call reads the files again."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not (self.directory / "config.resolved.toml").is_file():
            raise QuerlError(f"{self.directory}: no run directory; expected one with config.resolved.toml")

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The configuration with every value in force."""
        return load_config(self.directory, [])

    def episodes(self, as_: Form | None = None) -> Any:
        """Lines of `episodes.jsonl`, in order: dictionaries, or a pandas DataFrame or pyarrow Table. `Reward.score` takes all of these."""
        return _as(_lines(self.directory / "episodes.jsonl"), as_)

    def metrics(self, as_: Form | None = None) -> Any:
        """Lines of `metrics.jsonl`: `stage`, `step` and numbers by name."""
        return _as(_lines(self.directory / "metrics.jsonl"), as_)

    def figures(self, as_: Form | None = None) -> Any:
        """Figures of `eval.json`, one a row: `of` (a system such as `rl`, or a pair such as `rl-sft`), `metric`, `mean`,
        `low`, `high`, and `n` of pairs. Figures without a value are left out.
        """
        return _as(figures(self.evaluation), as_)

    @property
    def evaluation(self) -> dict[str, Any]:
        """`eval.json` as it is; empty before the stage `eval`."""
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
    """The objects of a JSON lines file; empty for a missing file. A last line that a killed process has not finished is left out."""
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
