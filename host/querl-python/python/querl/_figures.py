"""Figures of `eval.json`, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def figures(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """`{"of", "metric", "mean", "low", "high"}` of systems (`rl`) and pairs (`rl-sft`); figures without a value are left out."""
    records: list[dict[str, Any]] = []
    for kind in ("systems", "pairs"):
        for name, metrics in evaluation.get(kind, {}).items():
            records.extend({"of": name, "metric": metric, **figure} for metric, figure in _intervals(metrics))
    return records


def _intervals(metrics: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every interval `{"mean", "low", "high"}`, those of components as `components/NAME`."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            if isinstance(value.get("mean"), (int, float)):
                yield prefix + name, value
            else:
                yield from _intervals(value, f"{prefix}{name}/")
