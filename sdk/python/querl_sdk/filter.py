"""Filter plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from .settings import Settings
from .types import ColumnValue, Context, Hit


@dataclass(slots=True)
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
    columns: dict[str, ColumnValue] = field(default_factory=dict)
    """The other columns of the row, in the order of the table, where the filter declares ``columns``."""


class Filter(ABC):
    """Keeps samples in the training data or drops them.

    One object is made for each batch, which is one whole split, and sees its samples in order.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    """``("columns",)`` for a filter that cannot work without other columns of the table."""
    uses: ClassVar[tuple[str, ...]] = ()
    """``("columns",)`` for a filter that reads other columns where there are some."""

    def __init__(self, settings: Settings) -> None:
        """Reads the settings: every key that the plugin knows, whatever the values of the others.

        Raises :class:`querl_sdk.SettingError` for a value that cannot be used.
        """

    @abstractmethod
    def check(self, sample: Sample) -> None:
        """Returns to keep the sample; raises :class:`querl_sdk.Rejection` to drop it.

        What it remembers of the samples before it in the batch may count, for example to find duplicates.
        """
