"""Style scorer plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from .reward import Score
from .settings import Settings
from .types import Message, StyleProbability


@dataclass(slots=True)
class Dialogue:
    """A dialogue that ends with the assistant's turn to score."""

    id: str = ""
    """Unique in a run."""
    turns: list[Message] = field(default_factory=list)
    """All turns, oldest first."""


class StyleModel(Protocol):
    """The style model of the run. In a test, any object with this method."""

    def classify(self, turns: list[Message]) -> list[StyleProbability]:
        """The probabilities of all classes, in the model's order.

        Raises :class:`querl_sdk.HostCallError` if the run has no style model or the call failed.
        """
        ...


class StyleScorer(ABC):
    """Scores the style of the last turn of a dialogue."""

    def __init__(self, settings: Settings) -> None:
        """Reads all settings of the plugin. Must read every key unconditionally: the reads define the plugin's description.

        Raises :class:`querl_sdk.SettingError` for an invalid value.
        """

    @abstractmethod
    def score(self, dialogue: Dialogue, model: StyleModel) -> Score:
        """Scores one dialogue, from 0 (worst) to 1 (best).

        Raises :class:`querl_sdk.Rejection` if the dialogue cannot be scored; that is not a score of 0.
        """
