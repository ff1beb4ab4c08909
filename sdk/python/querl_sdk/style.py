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
    """A dialogue whose last turn, the assistant's, is to be scored."""

    id: str = ""
    """Unique in a run."""
    turns: list[Message] = field(default_factory=list)
    """All turns."""


class StyleModel(Protocol):
    """The style model of the run. In a test, any stand-in with this method."""

    def classify(self, turns: list[Message]) -> list[StyleProbability]:
        """The distribution over the model's classes, one entry per class, in the model's order.

        Raises :class:`querl_sdk.HostCallError` where there is no model, or no response.
        """
        ...


class StyleScorer(ABC):
    """Scores the style of the last turn of a dialogue."""

    def __init__(self, settings: Settings) -> None:
        """Reads the settings: every key that the plugin knows, whatever the values of the others.

        Raises :class:`querl_sdk.SettingError` for a value that cannot be used.
        """

    @abstractmethod
    def score(self, dialogue: Dialogue, model: StyleModel) -> Score:
        """Scores one dialogue, 0 (worst) to 1 (best).

        Raises :class:`querl_sdk.Rejection` where the dialogue cannot be scored. That is not a score of 0.
        """
