"""Data types shared by the kinds of plugins. Unknown values are ``None``, never an empty string or 0."""

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
"""Kinds of failures of external calls in this version of the contract. A later host may send others."""

Scalar = str | float | bool
ColumnValue = str | float | bool | list[Scalar]
"""A cell of the query table."""


class Record:
    """Base class of the records in an episode.

    A record that was decoded from JSON keeps the JSON object and converts each attribute at its first access, because most rewards
    read only a few attributes.
    """

    _json: dict[str, Any]
    _READERS: ClassVar[Mapping[str, Callable[[dict[str, Any]], Any]]] = {}

    @classmethod
    def from_json(cls: type[_R], value: dict[str, Any]) -> _R:
        """Creates the record from a JSON object in the encoding of ``json-rewards.wit``."""
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
    """User profile and conversation history."""

    user_profile: str | None = None
    """用户画像, description of the user."""
    history_summary: str | None = None
    """历史摘要, summary of the conversation so far; ``None`` at the start of a conversation."""


@dataclass
class Hit(Record):
    """One retrieved passage."""

    id: str | None = None
    """Id of the passage."""
    text: str = ""
    """Text of the passage."""
    reranker_score: float = 0.0
    """Relevance of the passage to the original query in its context, 0 to 1."""
    retrieval_score: float | None = None
    """First-stage retrieval score; its scale depends on the index."""
    rank: int = 1
    """Rank of the hit, from 1 (best)."""


@dataclass(slots=True)
class CallFailure:
    """A failed external call (retrieval or judge). Do not treat it as a low score."""

    kind: FailureKind | str
    message: str = ""
    """One sentence for people. Do not parse it: the wording may change."""


class Rejection(Exception):
    """Raised by a plugin that cannot compute a result for one item. querl drops and counts the item; that is not a score of 0.

    ``code`` is used for counting: 1 to 64 characters of ``a`` to ``z``, ``0`` to ``9``, ``_``, the same in all versions of the plugin.
    ``detail`` is one sentence for people and may be empty.
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
    """综合得分, overall score, 0 to 5."""
    reason: str = ""
    """The judge's explanation."""


@dataclass(slots=True)
class StyleProbability:
    """One class of a style distribution."""

    label: str
    """Name of the class, for example 售前."""
    probability: float
    """0 to 1. The probabilities of all classes sum to 1."""


@dataclass
class Candidate(Record):
    """A rewrite of the policy or the teacher, with its retrieval hits, judge score and style."""

    rewrite: str | None = None
    """The parsed rewrite, never blank; ``None`` if the response contains no rewrite."""
    retrieval: list[Hit] | CallFailure | None = None
    """Retrieved passages, best first (may be empty), or the failure of the call. ``None`` if the plugin does not declare ``retrieval``
    or the run has no retrieval. Empty if there is no rewrite."""
    judgement: JudgeScore | CallFailure | None = None
    """The judge's score, or the failure of the call. ``None`` if the plugin does not declare ``judgement``, or if the episode was not
    in the share that is judged."""
    style: list[StyleProbability] | None = None
    """Class probabilities of the style model; ``None`` if the plugin does not declare ``style`` or there is no rewrite."""
    n_tokens: int | None = None
    """Number of generated tokens, including the end-of-sequence token."""
    finish_reason: Literal["stop", "length"] | str | None = None
    """Why generation ended: ``stop``, ``length`` (token limit), or another reason as named by the service."""

    @property
    def is_truncated(self) -> bool:
        """True if the token limit ended the response."""
        return self.finish_reason == "length"

    def hits(self, side: str) -> list[Hit]:
        """The hits. Raises the rejection ``{side}_retrieval_failed`` if retrieval failed, ``{side}_retrieval_missing`` if it is ``None``."""
        if isinstance(self.retrieval, CallFailure):
            raise Rejection(f"{side}_retrieval_failed", self.retrieval.message)
        if self.retrieval is None:
            detail = "the rewrite was not looked up: the run has no retrieval, or the plugin does not declare `retrieval`"
            raise Rejection(f"{side}_retrieval_missing", detail)
        return self.retrieval

    def judged(self, side: str) -> JudgeScore | None:
        """The judge's score; ``None`` if not judged. Raises the rejection ``{side}_judgement_failed`` if the judge failed."""
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
        """A message with the role system."""
        return cls(Role.SYSTEM, content)

    @classmethod
    def user(cls, content: str) -> Message:
        """A message with the role user."""
        return cls(Role.USER, content)

    @classmethod
    def assistant(cls, content: str) -> Message:
        """A message with the role assistant."""
        return cls(Role.ASSISTANT, content)

    @classmethod
    def from_json(cls, value: dict[str, str]) -> Message:
        """Creates the message from a JSON object."""
        return cls(_ROLES[value["role"]], value["content"])


@dataclass
class Episode(Record):
    """One response of the policy to one query. Inputs that the plugin does not declare are ``None`` (``columns``: empty)."""

    id: str = ""
    """Unique in a run."""
    group_id: str = ""
    """Equal for all samples of one query in one rollout batch."""
    sample_index: int = 0
    """Index of the response in its group, from 0."""
    step: int | None = None
    """Training step of the rollout, from 0; ``None`` outside of training."""
    split: Literal["train", "validation", "test"] | str | None = None
    """The split that the query belongs to."""
    query: str = ""
    """The user's query."""
    context: Context = field(default_factory=Context)
    """User profile and conversation history."""
    gold_ids: list[str] | None = None
    """Ids of the gold passages: those known to answer the query."""
    columns: dict[str, ColumnValue] = field(default_factory=dict)
    """The other columns of the query table, in the table's order. Needs the input ``columns``."""
    prompt: list[Message] | None = None
    """The prompt of the policy, as messages. Needs the input ``prompt``."""
    response: str | None = None
    """The unparsed text that the policy generated; may be empty. Needs the input ``response``."""
    policy: Candidate = field(default_factory=Candidate)
    """The policy's rewrite, parsed from ``response``."""
    baseline: Candidate | None = None
    """The teacher's rewrite of the same query. Needs the input ``baseline``."""

    def baseline_or_reject(self) -> Candidate:
        """The teacher's rewrite. Raises the rejection ``baseline_missing`` if the episode has none."""
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
    """Creates the failure from a JSON object."""
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
    """Creates class probabilities from JSON objects."""
    return None if values is None else [StyleProbability(each["label"], float(each["probability"])) for each in values]


def _columns(value: dict[str, Any]) -> dict[str, ColumnValue]:
    columns = value.get("columns")
    return {} if columns is None else {name: _cell(cell) for name, cell in columns.items()}


def _cell(cell: Any) -> Any:
    """Converts all numbers to float, also those without a decimal point in JSON."""
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
# Class-level defaults would hide missing attributes from `__getattr__`, so remove them. Slots would work too, but a missing slot raises an
# exception first, which takes four times as long.
for _record in (Context, Hit, Candidate, Episode):
    for _field in fields(_record):
        if _field.name in vars(_record):
            delattr(_record, _field.name)
