"""Runs the golden cases of a plugin, the same as `querl plugin test`: `golden/*.jsonl`, one case per line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from .. import host, registry
from ..description import describe
from ..filter import Filter
from ..prompt import Prompt, PromptTask
from ..recording import recorded
from ..reward import GroupReward, Reward, Score
from ..settings import Settings, SettingSpec
from ..style import StyleScorer
from ..types import FailureKind, Message, Rejection
from . import json_form
from .builders import declared, style_model

_TOLERANCE = 1e-9
_WITH_CALLS = ("episode", "episodes", "samples")
_ABOUT = {
    "episode": Reward,
    "episodes": GroupReward,
    "samples": Filter,
    "task": Prompt,
    "parse_rewrite": Prompt,
    "parse_judgement": Prompt,
    "dialogue": StyleScorer,
}
_OTHER_KEYS = ("name", "settings", "input", "style_model", "calls", "expect")
_SCORE = ("total", "tolerance", "components", "rejected")
_EXPECT: dict[str, tuple[str, ...]] = {
    "episode": _SCORE,
    "episodes": _SCORE,
    "samples": ("drop",),
    "task": ("contains", "messages"),
    "parse_rewrite": ("rewrite", "rejected"),
    "parse_judgement": ("score", "reason", "rejected"),
    "dialogue": _SCORE,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


_FORM: dict[str, tuple[Callable[[Any], bool], str]] = {
    "total": (_is_number, "a number"),
    "tolerance": (_is_number, "a number"),
    "score": (_is_number, "a number"),
    "components": (lambda value: isinstance(value, dict) and all(map(_is_number, value.values())), "an object of numbers"),
    "contains": (_is_list, "a list of texts"),
    "messages": (_is_list, "a list of messages"),
}
"""Checks of the values in `expect`, by key, with the expected type in words. Other keys have texts."""

_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": (_is_text, "a text"),
    "number": (_is_number, "a number"),
    "integer": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "texts": (lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list of texts"),
}
"""Checks of the values in `settings`, by type, with the type in words."""

_RESULTS = (
    ("policy", "retrieval", "hits"),
    ("policy", "judgement", "scored"),
    ("baseline", "retrieval", "hits"),
    ("baseline", "judgement", "scored"),
)
"""The results of external calls in an episode, each with the key that has the result of a success."""

_FAILURES = (*get_args(FailureKind), "down", "over_budget")
"""Kinds of failures of external calls; the contract has the last two as `other`."""


@dataclass
class GoldenCase:
    """One golden case: the input of a call and the expected result."""

    place: str
    """File and line."""
    name: str
    settings: dict[str, Any]
    about: str
    """The kind of input: `episode`, `episodes`, `samples`, `task`, `parse_rewrite`, `parse_judgement` or `dialogue`."""
    sent: Any
    input: Any
    """The variables of the prompt, for a `task`."""
    style_model: Any
    """The style model's result, for a `dialogue`."""
    calls: list[dict[str, Any]]
    """Recorded results of host functions. Any other call fails with `not_recorded`."""
    expect: Any


def read_golden(folder: Path | str) -> list[GoldenCase]:
    """Reads the cases of a folder, in the order of files and lines. Raises :class:`ValueError` for an invalid case."""
    paths = sorted(Path(folder).glob("*.jsonl"))
    return [_case(place, value) for path in paths for place, value in json_form.lines(path)]


def check_golden(plugin: type, folder: Path | str) -> int:
    """Runs the cases of a folder for this class, each with a new object, and returns their number.

    Raises :class:`AssertionError` for the first case with another result, or if the folder has no case for this class.
    """
    cases = [case for case in read_golden(folder) if issubclass(plugin, _ABOUT[case.about])]
    assert cases, f"{folder} holds no case for {plugin.__name__}"
    # A case may set what another class of the plugin reads.
    known = {spec.key: spec for spec in describe({"": plugin, **(registry._exported or {})}).settings}
    for case in cases:
        for key, value in case.settings.items():
            names = f"expected one of {', '.join(f'`{name}`' for name in known)}" if known else "the plugin has no settings"
            assert key in known, f"{case.place} `{case.name}`: unknown setting `{key}`, {names}"
            is_valid, _ = _SETTINGS[known[key].value_type]
            problem = f"expected {_in_words(known[key])}, got {json_form.compact(value)}"
            assert is_valid(value), f"{case.place} `{case.name}`: setting `{key}`: {problem}"
        before = host._send_to(recorded(case.calls))
        try:
            returned = _answers(plugin(Settings(case.settings)), case)
        finally:
            host._send_to(before)
        assert _agrees(returned, case), f"{case.place} `{case.name}`: expected {json_form.compact(case.expect)}; returned {returned!r}"
    return len(cases)


def _in_words(spec: SettingSpec) -> str:
    """The allowed values of a setting, in the words of the host."""
    if spec.choices:
        *most, last = spec.choices
        return f"{', '.join(most)} or {last}" if most else last
    _, kind = _SETTINGS[spec.value_type]
    low, high = (bound if bound is None or not bound.is_integer() else int(bound) for bound in (spec.minimum, spec.maximum))
    match (low is not None, high is not None):
        case (True, True):
            return f"{kind} from {low} to {high}"
        case (True, False):
            return f"{kind} of {low} or more"
        case (False, True):
            return f"{kind} of at most {high}"
    return kind


def _case(place: str, value: Any) -> GoldenCase:
    try:
        fields = json_form.Fields(value, "case")
        name, settings = fields.take("name"), fields.optional("settings", {})
        about = next((about for about in _ABOUT if about in fields), None)
        if about is None:
            unknown = next((f"unknown key `{key}`, " for key in value if key not in _OTHER_KEYS), "")
            raise ValueError(f"{unknown}expected one of {', '.join(f'`{about}`' for about in _ABOUT)}")
        case = GoldenCase(
            place=place,
            name=name,
            settings=settings,
            about=about,
            sent=_sent(about, fields.take(about), name),
            input=json_form.prompt_input(fields.take("input")) if about == "task" else None,
            style_model=fields.optional("style_model") if about == "dialogue" else None,
            calls=[_call(call, number) for number, call in enumerate(fields.optional("calls", []), 1)] if about in _WITH_CALLS else [],
            expect=fields.take("expect"),
        )
        fields.end()
        _check_expect(about, case.expect)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{place}: {error}") from None
    return case


def _check_expect(about: str, value: Any) -> None:
    """Raises :class:`ValueError` for an unknown key of `expect`, or a value of another type."""
    for each in value if isinstance(value, list) else [value]:
        if each != "keep":
            fields = json_form.Fields(each, "expect")
            known = fields.known(*_EXPECT[about])
            fields.end()
            for key, got in known.items():
                is_valid, expected = _FORM.get(key, (_is_text, "a text"))
                if not is_valid(got):
                    raise ValueError(f"`{key}` in `expect` is {json_form.compact(got)}; expected {expected}")


def _sent(about: str, value: Any, name: str) -> Any:
    match about:
        case "episode":
            return _episode(value, name, "episode")
        case "episodes":
            return [_episode(each, f"{name}/{index}", f"episodes {index + 1}") for index, each in enumerate(value)]
        case "samples":
            return [json_form.sample(sample, str(number)) for number, sample in enumerate(value, 1)]
        case "task":
            return PromptTask(value)
        case "dialogue":
            return json_form.dialogue(value, name)
    return value


def _episode(value: Any, id: str, place: str) -> Any:
    for side, key, result in _RESULTS:
        candidate = value.get(side) if isinstance(value, dict) else None
        if isinstance(candidate, dict):
            _complete_result(candidate.get(key), result, f"{place}.{side}.{key}")
    return json_form.episode(value, id)


def _call(value: Any, number: int) -> dict[str, Any]:
    call = json_form.host_call(value)
    error = call["response"].get("Err") if isinstance(call["response"], dict) else None
    if isinstance(error, dict) and "failed" in error:
        _complete_failure(error["failed"], f"calls {number}.response.Err.failed")
    return call


def _complete_result(value: Any, result: str, place: str) -> None:
    """Raises :class:`ValueError` for another form, and fills in the message of a failure."""
    keys = list(value) if isinstance(value, dict) else []
    if keys == ["failed"]:
        _complete_failure(value["failed"], f"{place}.failed")
    elif keys != [result] and value is not None and (value, result) != ("not_sampled", "scored"):
        problem = f"expected an object with `{result}` or with `failed`"
        raise ValueError(f"`{place}` is {json_form.compact(value)}; {problem}")


def _complete_failure(failure: Any, place: str) -> None:
    fields = json_form.Fields(failure, place)
    kind, message = fields.optional("kind"), fields.optional("message", "")
    fields.end()
    if kind not in _FAILURES:
        names = "`, `".join(_FAILURES)
        raise ValueError(f"`{place}.kind` is {json_form.compact(kind)}; expected one of `{names}`")
    if not _is_text(message):
        raise ValueError(f"`{place}.message` is {json_form.compact(message)}; expected a text")
    failure["message"] = message


def _answers(plugin: Any, case: GoldenCase) -> Any:
    inputs = {*getattr(plugin, "requires", ()), *getattr(plugin, "uses", ())}
    match case.about:
        case "episode":
            return _attempt(plugin.score, declared(case.sent, inputs))
        case "episodes":
            return plugin.score_group([declared(each, inputs) for each in case.sent])
        case "samples":
            return [_attempt(plugin.check, sample) for sample in case.sent]
        case "task":
            return _attempt(plugin.messages, case.sent, case.input)
        case "dialogue":
            distribution = case.style_model and {each["label"]: each["probability"] for each in case.style_model}
            return _attempt(plugin.score, case.sent, style_model(distribution))
    return _attempt(getattr(plugin, case.about), case.sent)


def _attempt(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Rejection as rejection:
        return rejection


def _agrees(returned: Any, case: GoldenCase) -> bool:
    expect = case.expect
    if case.about == "samples":
        verdicts = ["keep" if verdict is None else {"drop": verdict.code} for verdict in returned]
        return bool(verdicts == expect)
    if case.about == "episodes":
        return len(returned) == len(expect) and all(map(_is_outcome, returned, expect))
    if isinstance(returned, Rejection) or case.about in ("episode", "dialogue"):
        return _is_outcome(returned, expect)
    if case.about == "task" and "messages" in expect:
        return bool(returned == [Message.from_json(message) for message in expect["messages"]])
    if case.about == "task":
        return all(any(text in message.content for message in returned) for text in expect.get("contains", [""]))
    if case.about == "parse_rewrite":
        return bool(returned == expect.get("rewrite"))
    return bool(returned.score == expect.get("score") and expect.get("reason", returned.reason) == returned.reason)


def _is_outcome(returned: Score | Rejection, expect: dict[str, Any]) -> bool:
    if isinstance(returned, Rejection):
        return bool(returned.code == expect.get("rejected"))
    if "total" not in expect:
        return False
    tolerance = expect.get("tolerance", _TOLERANCE)
    pairs = [(returned.total, expect["total"])]
    pairs += [(returned.components.get(name, float("nan")), value) for name, value in expect.get("components", {}).items()]
    return all(abs(value - expected) <= tolerance for value, expected in pairs)
