"""Checks of the plugin contract that need no component.

`querl plugin test` checks the component more completely. These checks take about a second and run under a debugger.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..description import range_of
from ..filter import Filter
from ..prompt import Prompt, PromptInput, PromptTask
from ..reward import GroupReward, Reward, Score
from ..settings import Settings
from ..style import StyleScorer
from ..types import Context, Episode, JudgeScore, Message, Rejection, Role
from .builders import candidate, declared, dialogue, episode, failed, host_functions, sample, style_model

_NAME = re.compile(r"[a-z0-9_]{1,64}")

# Empty, blank, Chinese, outside of the basic multilingual plane, right to left, control characters, markup, long.
_TEXTS = ["", " \n", "胶原蛋白肽怎么吃", "👩‍⚕️𠮷", "שלום", "a\u0000b\u202e", "<b>{}</b>\\\"'", "虾青素。" * 20_000]


def check_contract(plugin: type[Any], settings: Mapping[str, object] | None = None) -> None:
    """Calls a plugin's class with unusual but valid inputs and checks the results against the contract.

    Raises :class:`AssertionError` with the input, the result and the violated rule. Exceptions of the plugin other than rejections are
    not caught.
    """
    def make() -> Any:
        return plugin(Settings(settings))

    for base, check in _CHECKS.items():
        if issubclass(plugin, base):
            with host_functions(ask_judge=lambda messages: "3"):
                check(make)
            return
    raise TypeError(f"{plugin!r} is none of {', '.join(base.__name__ for base in _CHECKS)}")


def _range(make: Callable[[], Any]) -> tuple[float, float]:
    low, high = range_of(make())
    finite = math.isfinite(low) and math.isfinite(high)
    _expect(finite and low < high, "range()", (low, high), "two finite numbers, the first below the second")
    return low, high


def _reward(make: Callable[[], Any]) -> None:
    low, high = _range(make)
    for sent in _independent(make, [(each,) for each in _episodes(make())]):
        _score(_answer(make(), sent), sent, low, high)


def _group_reward(make: Callable[[], Any]) -> None:
    low, high = _range(make)
    episodes = _episodes(make())
    for group in [episodes[:1], episodes[:8], episodes]:
        given = [replace(each, sample_index=index) for index, each in enumerate(group)]
        outcomes = make().score_group(copy.deepcopy(given))
        _expect(len(outcomes) == len(given), f"{len(given)} episodes", outcomes, "one result per episode")
        for outcome, sent in zip(outcomes, given):
            _score(outcome, (sent,), low, high)
        backwards = make().score_group(copy.deepcopy(given[::-1]))
        _expect(backwards[::-1] == outcomes, "the same group backwards", backwards, "results that do not depend on the order")


def _style_scorer(make: Callable[[], Any]) -> None:
    models = [style_model(), style_model(failure=failed()), style_model({"售前": 0.75, "售后": 0.25})]
    for sent in _independent(make, [(dialogue("在吗", text), model) for text in _TEXTS for model in models]):
        _score(_answer(make(), sent), sent, 0.0, 1.0)


def _filter(make: Callable[[], Any]) -> None:
    batch = [sample(query, rewrite, scores) for query in _TEXTS[:4] for rewrite in _TEXTS for scores in [(), (0.9, 0.2)]]

    def verdicts() -> list[Any]:
        filter = make()
        return [_attempt(lambda: filter.check(copy.deepcopy(each))) for each in batch]

    first = verdicts()
    for each, verdict in zip(batch, first):
        kept = verdict is None or isinstance(verdict, Rejection)
        _expect(kept, each, verdict, "nothing for a sample that stays, or a raised Rejection")
    _expect(first == verdicts(), "the same batch twice", "other verdicts", "the same verdicts")


def _prompt(make: Callable[[], Any]) -> None:
    for task in PromptTask:
        for text in _TEXTS:
            asked = PromptInput(query=text, rewrite=text if task is PromptTask.JUDGE else None)
            _messages(make().messages(task, copy.deepcopy(asked)), (task, asked))
    for text in [*_TEXTS, "改写后的查询：胶原蛋白肽", "5", "score: 6", '{"score": 4}']:
        rewrite = _attempt(lambda: make().parse_rewrite(text))
        is_text = isinstance(rewrite, str) and rewrite.strip() != ""
        _expect(is_text or isinstance(rewrite, Rejection), text, rewrite, "a rewrite that is not blank, or a rejection")
        judged = _attempt(lambda: make().parse_judgement(text))
        in_range = isinstance(judged, JudgeScore) and 0 <= judged.score <= 5
        _expect(in_range or isinstance(judged, Rejection), text, judged, "a score from 0 to 5, or a rejection")


def _messages(messages: Any, sent: Any) -> None:
    roles = [message.role for message in messages]
    well_formed = bool(roles) and roles[-1] is Role.USER and Role.SYSTEM not in roles[1:]
    _expect(well_formed, sent, messages, "at least one message, the last from the user, a system message only at the start")


def _episodes(plugin: Any) -> list[Episode]:
    sides = [
        candidate("胶原蛋白肽的服用方法", [0.9, 0.8, 0.7], 4.5, {"售前": 1.0}, n_tokens=9, finish_reason="stop"),
        candidate("胶原蛋白肽", [0.0]),
        candidate(),
        candidate("胶原", failed("index down"), finish_reason="length"),
        candidate("胶原", [1.0], failed("judge down"), finish_reason="content_filter"),
        candidate("胶原", [1.0] * 50, 0.0),
    ]
    columns = {"text": "文", "number": 0.5, "flag": True, "items": ["a", 1.0]}
    prompt = [Message.system("改写"), Message.user("胶原咋吃")]
    paired = [
        episode("胶原咋吃", policy, baseline, gold_ids=["kb-1"], response=policy.rewrite or "", columns=columns, prompt=prompt)
        for policy in sides
        for baseline in [*sides, None]
    ]
    texts = [
        episode(text, candidate(text if text.strip() else None, [0.5]), sides[0], user_profile=text, response=text) for text in _TEXTS
    ]
    inputs = {*plugin.requires, *plugin.uses}
    return [declared(each, inputs) for each in paired + texts]


def _score(answer: Any, sent: Any, low: float, high: float) -> None:
    if isinstance(answer, Rejection):
        return
    _expect(isinstance(answer, Score), sent, answer, "a Score, or a raised Rejection")
    _expect(low <= answer.total <= high, sent, answer, f"a total from {low} to {high}")
    _expect(len(answer.components) <= 64, sent, answer, "at most 64 components")
    for name, value in answer.components.items():
        _expect(_NAME.fullmatch(name) is not None, sent, name, "a component name of 1 to 64 of a to z, 0 to 9 and _")
        _expect(math.isfinite(value), sent, f"{name} = {value}", "a finite component")


def _independent(make: Callable[[], Any], items: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Checks that one object for all items gives the same results as a new object per item, so that there is no state between items."""
    shared = make()
    for sent in items:
        together, alone = _answer(shared, sent), _answer(make(), sent)
        _expect(together == alone, sent, f"{together!r} in a batch, {alone!r} alone", "the same: no state between items")
    return items


def _answer(scorer: Any, sent: tuple[Any, ...]) -> Any:
    """The score or the rejection of a call. The plugin may modify its arguments."""
    return _attempt(lambda: scorer.score(*copy.deepcopy(sent)))


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Rejection as rejection:
        return rejection


def _expect(holds: bool, sent: object, returned: object, rule: str) -> None:
    assert holds, f"the contract expects {rule}; returned {_shown(returned)}; sent {_shown(sent)}"


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 400 else f"{text[:400]}… ({len(text)} characters)"


_CHECKS: dict[type, Callable[[Callable[[], Any]], None]] = {
    Reward: _reward,
    GroupReward: _group_reward,
    Filter: _filter,
    Prompt: _prompt,
    StyleScorer: _style_scorer,
}
