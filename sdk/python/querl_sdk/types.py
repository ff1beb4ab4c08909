"""Types that several kinds of plugin share. What is unknown is ``None``, never an empty text or 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

_CODE = re.compile(r"[a-z0-9_]{1,64}")

_R = TypeVar("_R", bound="Record")

FailureKind = Literal[
    "timeout", "unreachable", "unauthorized", "rejected", "rate_limited", "server_error", "invalid_response", "not_recorded"
]
"""The kinds of failure of an external call that this version of the contract names; a later host may send others."""

Scalar = str | float | bool
ColumnValue = str | float | bool | list[Scalar]
"""A cell of the query's row."""


class Record:
    """Base of the records of an episode.

    One that comes as JSON keeps its JSON object, and builds each attribute at the first access: most rewards read a few.
    """

    _json: dict[str, Any]
    _READERS: ClassVar[Mapping[str, Callable[[dict[str, Any]], Any]]] = {}

    @classmethod
    def from_json(cls: type[_R], value: dict[str, Any]) -> _R:
        """The record of a JSON object in the encoding of ``json-rewards.wit``."""
        record = cls.__new__(cls)
        record._json = value
        return record

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            read = self._READERS.get(name)
            if read is None:
                raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`")
            value = read(self._json)
            setattr(self, name, value)
            return value


@dataclass
class Context(Record):
    """Who asks, and what was said before."""

    user_profile: str | None = None
    """用户画像."""
    history_summary: str | None = None
    """历史摘要; ``None`` at the start of a conversation."""


@dataclass
class Hit(Record):
    """One retrieved passage."""

    id: str | None = None
    """Id of the passage."""
    text: str = ""
    """The passage."""
    reranker_score: float = 0.0
    """How well the passage answers the original query in its context, 0 to 1."""
    retrieval_score: float | None = None
    """First-stage score on the scale of the index."""
    rank: int = 1
    """1 for the best hit, then 2, 3 and so on."""


@dataclass(slots=True)
class CallFailure:
    """Why an external call gave no result. Never to be read as a low value."""

    kind: FailureKind | str
    message: str = ""
    """One sentence for a person. Its wording may change: do not parse it."""


class Rejection(Exception):
    """Raised where a plugin gives no result for one item. The item is dropped and counted; it is not a result of 0.

    ``code`` is for counting, 1 to 64 of ``a`` to ``z``, ``0`` to ``9``, ``_``, and stable over versions. ``detail`` is one
    sentence for a person and may be empty.
    """

    def __init__(self, code: str, detail: str = "") -> None:
        if not _CODE.fullmatch(code):
            raise ValueError(f"rejection code is `{code}`; expected 1 to 64 of a to z, 0 to 9 and _")
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}" if self.detail else self.code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rejection) and (self.code, self.detail) == (other.code, other.detail)

    def __hash__(self) -> int:
        return hash((self.code, self.detail))


@dataclass(slots=True)
class JudgeScore:
    """A judge's score of one rewrite."""

    score: float
    """综合得分, 0 to 5."""
    reason: str = ""
    """Why, in words."""


@dataclass(slots=True)
class StyleProbability:
    """One class of a style distribution."""

    label: str
    """The class, for example 售前."""
    probability: float
    """0 to 1; a distribution sums to 1."""


@dataclass
class Candidate(Record):
    """A rewrite with what is known of it: the policy's, or the teacher's."""

    rewrite: str | None = None
    """The parsed rewrite, never blank; ``None`` where the response contains no rewrite."""
    retrieval: list[Hit] | CallFailure | None = None
    """Hits, best first, perhaps none, or why there is no result. ``None`` where the rewrite was not looked up: the plugin does not
    declare ``retrieval``, or the run has none. Without a rewrite there are no hits."""
    judgement: JudgeScore | CallFailure | None = None
    """The judge's score, or why there is none. ``None`` where the rewrite was not judged: the plugin does not declare ``judgement``,
    or it was not sampled."""
    style: list[StyleProbability] | None = None
    """Style distribution; ``None`` where the plugin does not declare ``style``, or there is no rewrite."""
    n_tokens: int | None = None
    """Tokens generated, end of sequence included."""
    finish_reason: Literal["stop", "length"] | str | None = None
    """Why generation ended: ``stop``, ``length`` (the token limit), or a service's name of another reason."""

    @property
    def is_truncated(self) -> bool:
        """True where the token limit ended the response."""
        return self.finish_reason == "length"

    def hits(self, side: str) -> list[Hit]:
        """The hits. Raises the rejection ``{side}_retrieval_failed`` for a failed call, ``{side}_retrieval_missing`` without one."""
        if isinstance(self.retrieval, CallFailure):
            raise Rejection(f"{side}_retrieval_failed", self.retrieval.message)
        if self.retrieval is None:
            detail = "the rewrite was not looked up: the run has no retrieval, or the plugin does not declare `retrieval`"
            raise Rejection(f"{side}_retrieval_missing", detail)
        return self.retrieval

    def judged(self, side: str) -> JudgeScore | None:
        """The judge's score, ``None`` where the rewrite was not judged. Raises ``{side}_judgement_failed`` for a failed call."""
        if isinstance(self.judgement, CallFailure):
            raise Rejection(f"{side}_judgement_failed", self.judgement.message)
        return self.judgement


class Role(Enum):
    """The speaker of a chat message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


_ROLES = {role.value: role for role in Role}


@dataclass(slots=True)
class Message:
    """A chat message."""

    role: Role
    content: str

    @classmethod
    def system(cls, content: str) -> Message:
        """A system message: sets the task."""
        return cls(Role.SYSTEM, content)

    @classmethod
    def user(cls, content: str) -> Message:
        """A user's message."""
        return cls(Role.USER, content)

    @classmethod
    def assistant(cls, content: str) -> Message:
        """An assistant's message."""
        return cls(Role.ASSISTANT, content)

    @classmethod
    def from_json(cls, value: dict[str, str]) -> Message:
        """The message of a JSON object."""
        return cls(_ROLES[value["role"]], value["content"])


@dataclass
class Episode(Record):
    """One response of the policy to one query. Parts that the plugin does not declare are ``None``, or no columns."""

    id: str = ""
    """Unique in a run."""
    group_id: str = ""
    """The same for all samples of one query in one batch of rollouts."""
    sample_index: int = 0
    """Index of the response among the samples of its group, from 0."""
    step: int | None = None
    """Training step of the rollout, from 0; ``None`` outside of training."""
    split: Literal["train", "validation", "test"] | str | None = None
    """The split of the query's row."""
    query: str = ""
    """What the user typed."""
    context: Context = field(default_factory=Context)
    """Who asks, and what was said before."""
    gold_ids: list[str] | None = None
    """Ids of passages known to answer the query."""
    columns: dict[str, ColumnValue] = field(default_factory=dict)
    """The other columns of the query's row, in the order of the table. Needs ``columns``."""
    prompt: list[Message] | None = None
    """The messages that the policy answered. Needs ``prompt``."""
    response: str | None = None
    """The raw text that the policy generated, before it is parsed; may be empty. Needs ``response``."""
    policy: Candidate = field(default_factory=Candidate)
    """The policy's rewrite, parsed from ``response``."""
    baseline: Candidate | None = None
    """The teacher's rewrite of the same query. Needs ``baseline``."""

    def baseline_or_reject(self) -> Candidate:
        """The teacher's rewrite. Raises the rejection ``baseline_missing`` where the episode has none."""
        if self.baseline is None:
            raise Rejection("baseline_missing", "the episode has no teacher's rewrite, or the plugin does not declare `baseline`")
        return self.baseline


def _number(key: str) -> Callable[[dict[str, Any]], float]:
    return lambda value: float(value[key])


def _optional_number(value: Any) -> float | None:
    return None if value is None else float(value)


def _context(value: dict[str, Any]) -> Context:
    context = value.get("context")
    return Context.from_json(context) if context else Context()


def call_failure(value: dict[str, str]) -> CallFailure:
    """The failure of a JSON object."""
    return CallFailure(value["kind"], value["message"])


def _retrieval(value: dict[str, Any]) -> list[Hit] | CallFailure | None:
    retrieval = value.get("retrieval")
    if retrieval is None:
        return None
    hits = retrieval.get("hits")
    return call_failure(retrieval["failed"]) if hits is None else [Hit.from_json(hit) for hit in hits]


def _judgement(value: dict[str, Any]) -> JudgeScore | CallFailure | None:
    judgement = value.get("judgement")
    if judgement is None:
        return None
    scored = judgement.get("scored")
    return call_failure(judgement["failed"]) if scored is None else JudgeScore(float(scored["score"]), scored["reason"])


def distribution(values: list[dict[str, Any]] | None) -> list[StyleProbability] | None:
    """A style distribution of JSON objects."""
    return None if values is None else [StyleProbability(each["label"], float(each["probability"])) for each in values]


def _columns(value: dict[str, Any]) -> dict[str, ColumnValue]:
    columns = value.get("columns")
    return {} if columns is None else {name: _cell(cell) for name, cell in columns.items()}


def _cell(cell: Any) -> Any:
    """Numbers are floats, also where JSON has no decimal point."""
    kind = type(cell)
    return float(cell) if kind is int else [_cell(entry) for entry in cell] if kind is list else cell


def _prompt(value: dict[str, Any]) -> list[Message] | None:
    prompt = value.get("prompt")
    return None if prompt is None else [Message.from_json(message) for message in prompt]


def _baseline(value: dict[str, Any]) -> Candidate | None:
    baseline = value.get("baseline")
    return None if baseline is None else Candidate.from_json(baseline)


Context._READERS = {name: methodcaller("get", name) for name in ["user_profile", "history_summary"]}
Hit._READERS = {
    "id": methodcaller("get", "id"),
    "text": itemgetter("text"),
    "reranker_score": _number("reranker_score"),
    "retrieval_score": lambda value: _optional_number(value.get("retrieval_score")),
    "rank": itemgetter("rank"),
}
Candidate._READERS = {
    **{name: methodcaller("get", name) for name in ["rewrite", "n_tokens", "finish_reason"]},
    "retrieval": _retrieval,
    "judgement": _judgement,
    "style": lambda value: distribution(value.get("style")),
}
Episode._READERS = {
    **{name: itemgetter(name) for name in ["id", "group_id", "sample_index", "query"]},
    **{name: methodcaller("get", name) for name in ["step", "split", "gold_ids", "response"]},
    "context": _context,
    "columns": _columns,
    "prompt": _prompt,
    "policy": lambda value: Candidate.from_json(value["policy"]),
    "baseline": _baseline,
}
# Without the defaults in the class, an attribute that is not built yet is found missing at once. Slots would raise an exception first, at four
# times the cost.
for _record in (Context, Hit, Candidate, Episode):
    for _field in fields(_record):
        if _field.name in vars(_record):
            delattr(_record, _field.name)
