"""Converts between binding types and SDK types. In the bindings each case of a variant is a class, such as ``wit.Split_Train``."""

from __future__ import annotations

import re
from math import isfinite

from wit_world.imports import types as wit

from ..reward import Score
from ..types import CallFailure, Candidate, Context, Episode, Hit, JudgeScore, Message, Rejection, Role, StyleProbability

# Replaces binding classes by SDK classes with the same fields in the same order, which saves a conversion: componentize-py looks up a
# class in its module after the plugin was imported, and constructs it with positional arguments.
wit.Context, wit.Hit, wit.StyleProbability, wit.JudgeScore = Context, Hit, StyleProbability, JudgeScore

_ROLES_IN = {role: Role[role.name] for role in wit.Role}
_ROLES_OUT = {role: wit.Role[role.name] for role in Role}


def case_name(value) -> str:
    """The name of a variant's case: `rate_limited` for `FailureKind_RateLimited`. For the case `other`, its text."""
    case = type(value).__name__.split("_")[-1]
    return value.value if case == "Other" else re.sub(r"(?<=.)(?=[A-Z])", "_", case).lower()


def case_of(module, variant: str, name: str):
    """Constructs the case of a variant from its name in the contract, such as `group-reward`."""
    return getattr(module, f"{variant}_{''.join(part.capitalize() for part in name.split('-'))}")()


def call_failure(value) -> CallFailure:
    return CallFailure(case_name(value.kind), value.message)


def message_in(value) -> Message:
    return Message(_ROLES_IN[value.role], value.content)


def message_out(value: Message):
    return wit.Message(_ROLES_OUT[value.role], value.content)


def columns(values) -> dict:
    return {column.name: _cell(column.value) for column in values} if values else {}


def _cell(value):
    return [_cell(entry) for entry in value.value] if isinstance(value, wit.ColumnValue_Items) else value.value


def episode(value) -> Episode:
    return Episode(
        value.id,
        value.group_id,
        value.sample_index,
        value.step,
        None if value.split is None else case_name(value.split),
        value.query,
        value.context,
        value.gold_ids,
        columns(value.columns),
        None if value.prompt is None else [message_in(message) for message in value.prompt],
        value.response,
        _candidate(value.policy),
        None if value.baseline is None else _candidate(value.baseline),
    )


def _candidate(value) -> Candidate:
    reason = value.finish_reason
    return Candidate(
        value.rewrite,
        _result(value.retrieval),
        _result(value.judgement),
        value.style,
        value.n_tokens,
        None if reason is None else case_name(reason),
    )


def _result(value):
    """The result of a call, its failure, or None."""
    if value is None:
        return None
    return call_failure(value.value) if isinstance(value.value, wit.CallFailure) else value.value


def rejection(value: Rejection):
    return wit.Rejection(value.code, value.detail)


def parts(score: Score, place: str) -> tuple[float, dict[str, float]]:
    """Checks a score; returns total and components. The host checks them too, but its message cannot name the method."""
    if not isinstance(score, Score):
        raise TypeError(f"`{place}` gave {score!r}; expected a Score, or a raised Rejection")
    total, components = float(score.total), score.components
    if components:
        for name, value in components.items():
            if type(value) is not float:
                components[name] = value = float(value)
            if not isfinite(value):
                raise ValueError(f"`{place}` gave {value} as `{name}`; expected a finite number")
    if not isfinite(total):
        raise ValueError(f"`{place}` gave {total} as total; expected a finite number")
    return total, components


def score(value: Score, place: str):
    total, components = parts(value, place)
    return wit.Score(total, [wit.Component(name, part) for name, part in components.items()])
