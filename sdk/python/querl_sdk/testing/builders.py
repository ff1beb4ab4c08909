"""Builders for the inputs of plugins."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .. import host
from ..filter import Sample
from ..host import HostCallError
from ..style import Dialogue, StyleModel
from ..text import units
from ..types import CallFailure, Candidate, ColumnValue, Context, Episode, Hit, JudgeScore, Message, StyleProbability


def hits(*scores: float) -> list[Hit]:
    """Hits with these reranker scores and the ranks 1, 2, 3, ..."""
    return [Hit(id=f"kb-{rank}", text="", reranker_score=score, rank=rank) for rank, score in enumerate(scores, 1)]


def failed(message: str = "no response within 30 s", kind: str = "timeout") -> CallFailure:
    """A failed call, for ``retrieval`` or ``judgement``."""
    return CallFailure(kind, message)


def candidate(
    rewrite: str | None = None,
    scores: Sequence[float] | CallFailure | None = None,
    judged: float | CallFailure | None = None,
    style: Mapping[str, float] | None = None,
    *,
    n_tokens: int | None = None,
    finish_reason: str | None = None,
) -> Candidate:
    """A rewrite with the reranker scores of its hits (or a failed call) and the judge's score (or a failed call).

    Omitted values are unknown."""
    return Candidate(
        rewrite=rewrite,
        retrieval=scores if scores is None or isinstance(scores, CallFailure) else hits(*scores),
        judgement=judged if judged is None or isinstance(judged, CallFailure) else JudgeScore(judged),
        style=None if style is None else _distribution(style),
        n_tokens=n_tokens,
        finish_reason=finish_reason,
    )


def episode(
    query: str = "",
    policy: Candidate | str = "",
    baseline: Candidate | str | None = None,
    *,
    response: str | None = None,
    columns: Mapping[str, ColumnValue] | None = None,
    prompt: Sequence[Message] | None = None,
    user_profile: str | None = None,
    history_summary: str | None = None,
    gold_ids: Sequence[str] | None = None,
    sample_index: int = 0,
) -> Episode:
    """An episode. A string as ``policy`` or ``baseline`` is a rewrite without retrieval and judge score."""
    return Episode(
        id=f"test/{sample_index}",
        group_id="test",
        sample_index=sample_index,
        query=query,
        context=Context(user_profile, history_summary),
        gold_ids=None if gold_ids is None else list(gold_ids),
        columns=dict(columns or {}),
        prompt=None if prompt is None else list(prompt),
        response=response,
        policy=candidate(policy or None) if isinstance(policy, str) else policy,
        baseline=candidate(baseline) if isinstance(baseline, str) else baseline,
    )


def declared(episode: Episode, inputs: Container[str]) -> Episode:
    """The episode with only the inputs that a plugin declares, as the host passes it."""

    def side(of: Candidate) -> Candidate:
        return replace(of, **{part: None for part in ("retrieval", "judgement", "style") if part not in inputs})

    absent: dict[str, Any] = {part: None for part in ("response", "prompt", "baseline") if part not in inputs}
    if "columns" not in inputs:
        absent["columns"] = {}
    if episode.baseline is not None and "baseline" in inputs:
        absent["baseline"] = side(episode.baseline)
    return replace(episode, policy=side(episode.policy), **absent)


def sample(query: str, rewrite: str, scores: Sequence[float] = (0.9,), columns: Mapping[str, ColumnValue] | None = None) -> Sample:
    """A sample with hits of these reranker scores."""
    return Sample(id="test", original_query=query, rewritten_query=rewrite, hits=hits(*scores), columns=dict(columns or {}))


def dialogue(*texts: str) -> Dialogue:
    """A dialogue with alternating roles that ends with an assistant turn."""
    speakers = (Message.user, Message.assistant)
    first = len(texts) % 2
    return Dialogue(id="test", turns=[speakers[(first + index) % 2](text) for index, text in enumerate(texts)])


@contextmanager
def host_functions(
    *,
    count_tokens: Callable[[str], int] = lambda text: len(units(text)),
    split_tokens: Callable[[str], list[str]] = units,
    words: Callable[[str], list[str]] = units,
    embed: Callable[[list[str]], list[list[float]]] | None = None,
    ask_judge: Callable[[list[Message]], str] | None = None,
    classify: Callable[[list[Message]], list[StyleProbability]] | None = None,
) -> Iterator[None]:
    """Replaces host functions within a ``with`` block.

    Defaults: tokens and words are :func:`querl_sdk.text.units`, embeddings are character counts, and judge and style model are not
    configured. A replacement may raise :class:`querl_sdk.HostCallError`.
    """
    functions = {
        "count_tokens": count_tokens,
        "split_tokens": split_tokens,
        "segment_words": words,
        "embed": embed or _character_vectors,
        "ask_judge": ask_judge,
        "classify_style": classify,
    }

    def call(interface: str, function: str, argument: Any) -> Any:
        stand_in: Any = functions[function]
        if stand_in is None:
            raise HostCallError(interface)
        return stand_in(argument)

    before = host._send_to(call)
    try:
        yield
    finally:
        host._send_to(before)


def _character_vectors(texts: list[str]) -> list[list[float]]:
    """L2-normalised vectors of size 64: counts of code points modulo 64. An empty text gives the first unit vector."""
    vectors = []
    for text in texts:
        counts = [0.0] * 64
        for character in text or "\0":
            counts[ord(character) % 64] += 1
        length = math.sqrt(sum(count * count for count in counts))
        vectors.append([count / length for count in counts])
    return vectors


def style_model(distribution: Mapping[str, float] | None = None, failure: CallFailure | None = None) -> StyleModel:
    """A style model with a constant result: class probabilities, a failed call, or (without arguments) "not configured"."""
    return _FixedModel(distribution, failure)


class _FixedModel:
    def __init__(self, distribution: Mapping[str, float] | None, failure: CallFailure | None) -> None:
        self._distribution = distribution
        self._failure = failure

    def classify(self, turns: list[Message]) -> list[StyleProbability]:
        if self._distribution is None:
            raise HostCallError("style-model", self._failure)
        return _distribution(self._distribution)


def _distribution(probabilities: Mapping[str, float]) -> list[StyleProbability]:
    return [StyleProbability(label, probability) for label, probability in probabilities.items()]
