"""Short ways to what a plugin is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..filter import Sample
from ..reward import Episode
from ..style import ClassifyError, Dialogue, StyleModel
from ..types import CallFailure, Candidate, Context, FailureKind, Hit, JudgeScore, Message, StyleProbability


def hits(*scores: float) -> list[Hit]:
    """Hits with these reranker scores, ranked in this order."""
    return [Hit(id=f"kb-{rank}", text="", reranker_score=score, rank=rank) for rank, score in enumerate(scores, 1)]


def failed(message: str = "no answer within 30 s", kind: FailureKind = FailureKind.TIMEOUT) -> CallFailure:
    """A failed call, for ``retrieval`` or ``judgement``."""
    return CallFailure(kind, message)


def candidate(
    rewrite: str = "",
    scores: Sequence[float] | CallFailure = (),
    judged: float | CallFailure | None = None,
    style: Mapping[str, float] | None = None,
    *,
    truncated: bool = False,
) -> Candidate:
    """One side: its rewrite, the scores of its hits (or a failed call), the judge's score (or a failed call)."""
    return Candidate(
        rewrite=rewrite,
        retrieval=scores if isinstance(scores, CallFailure) else hits(*scores),
        judgement=judged if judged is None or isinstance(judged, CallFailure) else JudgeScore(judged),
        style=None if style is None else _distribution(style),
        truncated=truncated,
    )


def episode(
    query: str = "",
    policy: Candidate | str = "",
    baseline: Candidate | str = "",
    *,
    user_profile: str = "",
    history_summary: str = "",
    gold_ids: Sequence[str] = (),
) -> Episode:
    """An episode; a side given as a text is a rewrite that found nothing and was not judged."""
    return Episode(
        id="test",
        query=query,
        context=Context(user_profile, history_summary),
        gold_ids=list(gold_ids),
        policy=candidate(policy) if isinstance(policy, str) else policy,
        baseline=candidate(baseline) if isinstance(baseline, str) else baseline,
    )


def sample(query: str, rewrite: str, scores: Sequence[float] = (0.9,)) -> Sample:
    """A sample with hits of these reranker scores."""
    return Sample(id="test", original_query=query, rewritten_query=rewrite, hits=hits(*scores))


def dialogue(*texts: str) -> Dialogue:
    """A dialogue whose turns alternate and end with the assistant's."""
    speakers = (Message.user, Message.assistant)
    first = len(texts) % 2
    return Dialogue(id="test", turns=[speakers[(first + index) % 2](text) for index, text in enumerate(texts)])


def style_model(distribution: Mapping[str, float] | None = None, failure: CallFailure | None = None) -> StyleModel:
    """A style model that always says the same: a distribution by label, a failure, or, without either, that there is none."""
    return _FixedModel(distribution, failure)


class _FixedModel:
    def __init__(self, distribution: Mapping[str, float] | None, failure: CallFailure | None) -> None:
        self._distribution = distribution
        self._failure = failure

    def classify(self, turns: list[Message]) -> list[StyleProbability]:
        if self._distribution is None:
            raise ClassifyError(self._failure)
        return _distribution(self._distribution)


def _distribution(probabilities: Mapping[str, float]) -> list[StyleProbability]:
    return [StyleProbability(label, probability) for label, probability in probabilities.items()]
