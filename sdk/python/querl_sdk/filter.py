"""Filter plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from .settings import Settings
from .types import ColumnValue, Context, Hit


@dataclass(slots=True)
class Sample:
    """A row of the query table whose rewrite and retrieval both succeeded."""

    id: str = ""
    """Id of the row, unique in the batch."""
    original_query: str = ""
    """The user's query."""
    rewritten_query: str = ""
    """The teacher's rewrite."""
    context: Context = field(default_factory=Context)
    """User profile and conversation history."""
    hits: list[Hit] = field(default_factory=list)
    """Retrieved passages for the rewrite, best first; empty if nothing was found."""
    columns: dict[str, ColumnValue] = field(default_factory=dict)
    """The other columns of the row, in the order of the table. Empty unless the filter declares ``columns``."""


class Filter(ABC):
    """Decides for each sample whether it stays in the training data.

    One object is constructed per batch and gets its samples in order. A batch is a complete split, or a part of it of at most 8192 samples
    or 32 MiB of text if the split is larger.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    """``("columns",)`` if the filter needs other columns of the query table."""
    uses: ClassVar[tuple[str, ...]] = ()
    """``("columns",)`` if the filter reads other columns of the query table when there are any."""

    def __init__(self, settings: Settings) -> None:
        """Reads all settings of the plugin. Must read every key unconditionally: the reads define the plugin's description.

        Raises :class:`querl_sdk.SettingError` for an invalid value.
        """

    @abstractmethod
    def check(self, sample: Sample) -> None:
        """Returns to keep the sample; raises :class:`querl_sdk.Rejection` to drop it.

        The result may depend on earlier samples of the batch, for example to remove duplicates.
        """
