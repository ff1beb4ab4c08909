"""The values that several kinds of plugin share."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

_CODE = re.compile(r"[a-z0-9_]{1,64}")


@dataclass
class Context:
    """Who asks, and what was said before."""

    user_profile: str = ""
    """用户画像. Empty where unknown."""
    history_summary: str = ""
    """历史摘要. Empty where nothing was said."""


@dataclass
class Hit:
    """One retrieved passage."""

    id: str = ""
    """Id of the passage. Empty where the retrieval service sends none."""
    text: str = ""
    """The passage."""
    reranker_score: float = 0.0
    """How well the passage answers the original query in its context, 0 to 1."""
    retrieval_score: float | None = None
    """First-stage score, where known; its scale is the index's own."""
    rank: int = 1
    """1 for the best."""


class FailureKind(Enum):
    """The sorts of failure of an outside call."""

    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    UNAUTHORIZED = "unauthorized"
    REJECTED = "rejected"
    RATE_LIMITED = "rate_limited"
    SERVER_ERROR = "server_error"
    INVALID_RESPONSE = "invalid_response"
    NOT_RECORDED = "not_recorded"


@dataclass
class CallFailure:
    """Why an outside call gave no answer. Never to be read as a low value."""

    kind: FailureKind
    message: str = ""
    """One sentence for a person. Its wording may change: do not parse it."""


class Rejection(Exception):
    """Raised where a plugin has no answer for one item. The item is dropped and counted; it is not an answer of 0.

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


@dataclass
class JudgeScore:
    """A judge's score of one rewrite."""

    score: float
    """综合得分, 0 to 5."""
    reason: str = ""
    """Why, in words."""


@dataclass
class StyleProbability:
    """One class of a style distribution."""

    label: str
    """``售前`` and so on."""
    probability: float
    """0 to 1; a distribution sums to 1."""


@dataclass
class Candidate:
    """One side of the competition: the policy's rewrite, or the teacher's."""

    rewrite: str = ""
    """The rewrite, parsed."""
    retrieval: list[Hit] | CallFailure = field(default_factory=list)
    """Its hits, best first, or why there are none. An empty list is an answer: nothing was found."""
    judgement: JudgeScore | CallFailure | None = None
    """What the judge said of it, or why it said nothing; ``None`` where nobody asked it."""
    style: list[StyleProbability] | None = None
    """Style distribution, where a style model is configured."""
    n_tokens: int = 0
    """Tokens generated, end of sequence included; 0 where unknown."""
    truncated: bool = False
    """True where the token limit cut the answer off."""

    def hits(self, side: str) -> list[Hit]:
        """Its hits; a failed call is raised as the rejection ``{side}_retrieval_failed``."""
        if isinstance(self.retrieval, CallFailure):
            raise Rejection(f"{side}_retrieval_failed", self.retrieval.message)
        return self.retrieval

    def judged(self, side: str) -> JudgeScore | None:
        """What the judge said, ``None`` where nobody asked; a failed call is raised as ``{side}_judgement_failed``."""
        if isinstance(self.judgement, CallFailure):
            raise Rejection(f"{side}_judgement_failed", self.judgement.message)
        return self.judgement


class Role(Enum):
    """Who speaks in a chat message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass
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
