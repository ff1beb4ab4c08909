"""Converts tables and records to lists of dictionaries."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

_EXPECTED = "expected a list of dictionaries or dataclasses, a pandas DataFrame or a pyarrow Table"


def rows(table: object) -> list[dict[str, Any]]:
    """Converts a table to a list of dictionaries with JSON values.

    table: an iterable of dictionaries or dataclasses, a pandas or polars DataFrame, a pyarrow Table, or a Hugging Face
        dataset.

    Keys whose value is None are removed, because parquet files pad missing keys with null. A line of `episodes.jsonl` is
    replaced by its `episode`.

    Raises TypeError, with row and field, for NaN, Inf and values that JSON cannot represent.
    """
    return [_row(item, index) for index, item in enumerate(_items(table))]


def _items(table: object) -> Iterable[object]:
    if isinstance(table, (str, bytes, Mapping)) or _is_record(table):
        raise TypeError(f"{_EXPECTED}; got one {type(table).__name__}; one row is a list with one element")
    for method in ("to_pylist", "to_dicts"):  # pyarrow, polars
        convert = getattr(table, method, None)
        if callable(convert):
            return list(convert())
    if type(table).__module__.partition(".")[0] == "pandas":
        frame: Any = table
        return list(frame.to_dict(orient="records"))
    if isinstance(table, Iterable):
        return table
    raise TypeError(f"{_EXPECTED}; got {type(table).__name__}")


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _row(item: object, index: int) -> dict[str, Any]:
    record: Any = item
    row = dataclasses.asdict(record) if _is_record(item) else item
    if not isinstance(row, Mapping):
        raise TypeError(f"row {index}: {type(item).__name__}; expected a dictionary or a dataclass")
    if "format" in row and isinstance(row.get("episode"), Mapping):
        if row["format"] != 3:
            raise TypeError(f"row {index}, field `format`: {row['format']}; expected 3: score older files with `querl plugin replay`")
        row = row["episode"]
    return {key: _json(value, index, key) for key, value in _named(row, index, "")}


def _named(mapping: Mapping[Any, Any], index: int, field: str) -> list[tuple[str, Any]]:
    """The entries whose value is not None."""
    for key in mapping:
        if not isinstance(key, str):
            raise _refused(index, field or "(row)", f"a key that is {type(key).__name__}", "a text")
    return [(key, value) for key, value in mapping.items() if value is not None]


def _json(value: Any, index: int, field: str) -> Any:
    if isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        raise _refused(index, field, str(value), "a finite number, or None where there is no value")
    if _is_record(value):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: _json(entry, index, f"{field}.{key}") for key, entry in _named(value, index, field)}
    if isinstance(value, (list, tuple)):
        return [_json(entry, index, f"{field}[{position}]") for position, entry in enumerate(value)]
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return _json(value.tolist(), index, field)
    if type(value).__name__ in ("NAType", "NaTType"):
        raise _refused(index, field, str(value), "a value, or None where there is none")
    raise _refused(index, field, "None" if value is None else type(value).__name__, "a text, a number, true, false, a list or a dictionary")


def _refused(index: int, field: str, got: str, expected: str) -> TypeError:
    remedy = "; a DataFrame without NaN: frame.astype(object).where(frame.notna(), None)" if got.lower() in ("nan", "<na>", "nat") else ""
    return TypeError(f"row {index}, field `{field}`: {got}; expected {expected}{remedy}")
