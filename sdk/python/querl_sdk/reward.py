"""Reward plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from .settings import Settings
from .types import Episode, Rejection


@dataclass(slots=True)
class Score:
    """The score of an episode (rewards) or of a dialogue (style scorers)."""

    total: float
    """A finite number within the declared range; 0 to 1 for style scorers."""
    components: dict[str, float] = field(default_factory=dict)
    """Named parts of the score, for reports: at most 64 finite numbers, which need not sum to the total. Names have 1 to 64 characters
    of ``a`` to ``z``, ``0`` to ``9``, ``_``."""


class _Scorer(ABC):
    requires: ClassVar[tuple[str, ...]] = ()
    """Required inputs, of ``response``, ``prompt``, ``columns``, ``baseline``, ``retrieval``, ``judgement``, ``style``. querl refuses a
    run that cannot provide one. Inputs that are neither required nor in ``uses`` are left out of the episodes."""
    uses: ClassVar[tuple[str, ...]] = ()
    """Optional inputs: read if the run has them."""

    def __init__(self, settings: Settings) -> None:
        """Reads all settings of the plugin. Must read every key unconditionally: the reads define the plugin's description.

        Raises :class:`querl_sdk.SettingError` for an invalid value.
        """

    @abstractmethod
    def range(self) -> tuple[float, float]:
        """The lowest and the highest possible total with these settings."""


class Reward(_Scorer):
    """Scores responses of the policy, one episode at a time.

    One object is constructed per batch. A score may depend only on the episode, the settings and the results of host functions: keep
    no state between episodes.
    """

    @abstractmethod
    def score(self, episode: Episode) -> Score:
        """Scores one episode.

        Raises :class:`querl_sdk.Rejection` if the episode cannot be scored, for example because retrieval failed. The episode is then
        dropped; that is not a score of 0.
        """


class GroupReward(_Scorer):
    """Scores all samples of one query together, for example by diversity or rank within the group.

    A score may depend only on the episodes of its group, the settings and the results of host functions. It must not depend on the order
    of the episodes.
    """

    @abstractmethod
    def score_group(self, episodes: list[Episode]) -> list[Score | Rejection]:
        """One score per episode, in the same order. A returned rejection drops one episode; a raised one drops the group."""
