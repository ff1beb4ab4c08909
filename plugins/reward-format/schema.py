"""Validation by a subset of JSON Schema (draft 2020-12, validation vocabulary). README.md lists the keywords."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]

_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "number": (int, float)}
_IGNORED = {"$schema", "$id", "$comment", "title", "description", "default", "examples"}
# By keyword: the type of its argument, the type of the values that it applies to, and the check of such a value.
_KEYWORDS: dict[str, tuple[str, str, Callable[[Any, Any], bool]]] = {
    "required": ("array", "object", lambda value, names: all(name in value for name in names)),
    "minLength": ("integer", "string", lambda value, limit: len(value) >= limit),
    "maxLength": ("integer", "string", lambda value, limit: len(value) <= limit),
    "minItems": ("integer", "array", lambda value, limit: len(value) >= limit),
    "maxItems": ("integer", "array", lambda value, limit: len(value) <= limit),
    "minimum": ("number", "number", lambda value, limit: value >= limit),
    "maximum": ("number", "number", lambda value, limit: value <= limit),
}


def compile_schema(schema: Any) -> Check:
    """The check of a value by a schema. Raises :class:`ValueError` for an invalid schema or an unsupported keyword."""
    if isinstance(schema, bool):
        return lambda value: schema
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object, true or false; got {schema!r}")
    checks = [_keyword(keyword, argument, schema) for keyword, argument in schema.items() if keyword not in _IGNORED]
    return lambda value: all(check(value) for check in checks)


def _keyword(keyword: str, argument: Any, schema: dict[str, Any]) -> Check:
    if keyword in _KEYWORDS:
        expected, looked_at, holds = _KEYWORDS[keyword]
        _expect(keyword, argument, expected)
        if keyword == "required" and not all(isinstance(name, str) for name in argument):
            raise ValueError(f"`required` is {argument!r}; expected names of properties")
        return lambda value: not _is(value, looked_at) or holds(value, argument)
    match keyword:
        case "type":
            names = argument if isinstance(argument, list) else [argument]
            if not all(name == "integer" or name in _TYPES for name in names):
                raise ValueError(f"`type` is {argument!r}; expected names of types")
            return lambda value: any(_is(value, name) for name in names)
        case "enum":
            _expect(keyword, argument, "array")
            # 1 and true are different in JSON, but equal in Python.
            return lambda value: any(value == entry and isinstance(value, bool) == isinstance(entry, bool) for entry in argument)
        case "pattern":
            _expect(keyword, argument, "string")
            pattern = re.compile(argument)
            return lambda value: not isinstance(value, str) or pattern.search(value) is not None
        case "items":
            check = compile_schema(argument)
            return lambda value: not isinstance(value, list) or all(map(check, value))
        case "properties":
            _expect(keyword, argument, "object")
            checks = {name: compile_schema(each) for name, each in argument.items()}
            return lambda value: not isinstance(value, dict) or all(check(value[name]) for name, check in checks.items() if name in value)
        case "additionalProperties":
            check, known = compile_schema(argument), schema.get("properties", {})
            return lambda value: not isinstance(value, dict) or all(check(each) for name, each in value.items() if name not in known)
    raise ValueError(f"`{keyword}` is not known here")


def _is(value: Any, name: str) -> bool:
    if name == "integer":
        return _is(value, "number") and (isinstance(value, int) or value.is_integer())
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _expect(keyword: str, argument: Any, name: str) -> None:
    if not _is(argument, name):
        raise ValueError(f"`{keyword}` is {argument!r}; expected a value of type {name}")
