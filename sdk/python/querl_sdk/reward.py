"""Reward plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from .settings import Settings
from .types import Episode, Rejection


@dataclass(slots=True)
class Score:
    """The score of one episode, or of one dialogue's style."""

    total: float
    """Finite, and within the range that the plugin declares; 0 to 1 for a style."""
    components: dict[str, float] = field(default_factory=dict)
    """Named parts, finite, at most 64; they need not sum to the total. Names: 1 to 64 of ``a`` to ``z``, ``0`` to ``9``, ``_``."""


class _Scorer(ABC):
    requires: ClassVar[tuple[str, ...]] = ()
    """Inputs without which the plugin cannot score: ``response``, ``prompt``, ``columns``, ``baseline``, ``retrieval``,
    ``judgement``, ``style``. A run that cannot provide one is refused. Episodes have no other of these parts."""
    uses: ClassVar[tuple[str, ...]] = ()
    """Inputs that the plugin reads where the run has them."""

    def __init__(self, settings: Settings) -> None:
        """Reads the settings: every key that the plugin knows, whatever the values of the others.

        Raises :class:`querl_sdk.SettingError` for a value that cannot be used.
        """

    @abstractmethod
    def range(self) -> tuple[float, float]:
        """The lowest and the highest total under these settings."""


class Reward(_Scorer):
    """Scores what the policy generated, one episode at a time.

    One object is made for each call and scores the episodes of a batch one by one. A score depends on its episode, the
    settings and the results of host functions: keep nothing from one episode to the next.
    """

    @abstractmethod
    def score(self, episode: Episode) -> Score:
        """Scores one episode.

        Raises :class:`querl_sdk.Rejection` where the episode cannot be scored, for example because a call failed.
        That is not a score of 0.
        """


class GroupReward(_Scorer):
    """Scores all samples of one query together, for rewards of diversity or rank.

    A score depends on the episodes of its group, the settings and the results of host functions, and not on their order.
    """

    @abstractmethod
    def score_group(self, episodes: list[Episode]) -> list[Score | Rejection]:
        """One score per episode, in their order; a rejection drops its episode alone. Raising one rejects the whole group."""
