"""Reward plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from .settings import Settings
from .types import Candidate, Context


@dataclass
class Episode:
    """Everything that a reward may look at."""

    id: str = ""
    """Unique in a run."""
    query: str = ""
    """What the user typed."""
    context: Context = field(default_factory=Context)
    """Who asks, and what was said before."""
    gold_ids: list[str] = field(default_factory=list)
    """Ids of passages known to answer the query; empty where unknown."""
    policy: Candidate = field(default_factory=Candidate)
    """The policy's side."""
    baseline: Candidate = field(default_factory=Candidate)
    """The teacher's side."""


@dataclass
class Score:
    """The score of one episode, or of one dialogue's style."""

    total: float
    """Finite, and within the range that the plugin declares; 0 to 1 for a style."""
    components: dict[str, float] = field(default_factory=dict)
    """Named parts, finite; they need not sum to the total. Names: 1 to 64 of ``a`` to ``z``, ``0`` to ``9``, ``_``."""


class Reward(ABC):
    """Scores what the policy wrote against what the teacher wrote.

    One object is made for each call and scores the episodes of a batch one by one. A score depends on its episode and the
    settings only: keep nothing from one episode to the next.
    """

    def __init__(self, settings: Settings) -> None:
        """Reads the settings: every key that the plugin knows, whatever the values of the others.

        Raises :class:`querl_sdk.SettingError` for a value that cannot be used.
        """

    @abstractmethod
    def range(self) -> tuple[float, float]:
        """The lowest and the highest total under these settings."""

    @abstractmethod
    def score(self, episode: Episode) -> Score:
        """Scores one episode.

        Raises :class:`querl_sdk.Rejection` where the episode cannot be scored, for example because a call failed on one side.
        That is not a score of 0, which means a draw.
        """
