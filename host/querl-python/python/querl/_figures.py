"""The metrics of `eval.json` as a flat list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def figures(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """One record `{"of", "metric", "mean", "low", "high"}` for each metric of a system (`of="rl"`) or of a pair (`of="rl-sft"`).

    `low` and `high` bound the 95% bootstrap interval. Metrics without a value are left out.
    """
    records: list[dict[str, Any]] = []
    for kind in ("systems", "pairs"):
        for name, metrics in evaluation.get(kind, {}).items():
            records.extend({"of": name, "metric": metric, **figure} for metric, figure in _intervals(metrics))
    return records


def _intervals(metrics: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields name and interval `{"mean", "low", "high"}` of each metric. Nested metrics are named `components/NAME`."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            if isinstance(value.get("mean"), (int, float)):
                yield prefix + name, value
            else:
                yield from _intervals(value, f"{prefix}{name}/")
