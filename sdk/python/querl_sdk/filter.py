"""Filter plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from .settings import Settings
from .types import Context, Hit


@dataclass
class Sample:
    """A row whose rewrite and retrieval both succeeded."""

    id: str = ""
    """Id of the row, unique in the batch."""
    original_query: str = ""
    """What the user typed."""
    rewritten_query: str = ""
    """The teacher's rewrite."""
    context: Context = field(default_factory=Context)
    """Who asks, and what was said before."""
    hits: list[Hit] = field(default_factory=list)
    """Hits of the rewrite, best first; empty where nothing was found."""


class Filter(ABC):
    """Keeps samples in the training data or drops them.

    One object is made for each batch, which is one whole split, and sees its samples in order.
    """

    def __init__(self, settings: Settings) -> None:
        """Reads the settings: every key that the plugin knows, whatever the values of the others.

        Raises :class:`querl_sdk.SettingError` for a value that cannot be used.
        """

    @abstractmethod
    def check(self, sample: Sample) -> None:
        """Returns to keep the sample; raises :class:`querl_sdk.Rejection` to drop it.

        What it remembers of the samples before it in the batch may count, for example to find duplicates.
        """
