"""Prompt plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum

from .settings import Settings
from .types import Context, JudgeScore, Message


class PromptTask(Enum):
    """The purpose of a prompt. The SDK rejects a task that is not here (``unknown_task``)."""

    TEACHER_REWRITE = "teacher_rewrite"
    """The teacher's prompt: long, with the tenant's rules."""
    POLICY_REWRITE = "policy_rewrite"
    """The policy's prompt: short; the model learns the rules in training."""
    JUDGE = "judge"
    """The judge's prompt. The response to it goes to ``parse_judgement``."""


@dataclass(slots=True)
class PromptInput:
    """What goes into a prompt."""

    query: str = ""
    """What the user typed."""
    context: Context = field(default_factory=Context)
    """Who asks, and what was said before."""
    rewrite: str | None = None
    """The rewrite to judge; ``None`` in the rewrite tasks."""


class Prompt(ABC):
    """A tenant's prompts, and the parsing of responses to them."""

    def __init__(self, settings: Settings) -> None:
        """Reads the settings: every key that the plugin knows, whatever the values of the others.

        Raises :class:`querl_sdk.SettingError` for a value that cannot be used.
        """

    @abstractmethod
    def messages(self, task: PromptTask, input: PromptInput) -> list[Message]:
        """The conversation for one task: the last message is the user's, a system message is only at the start.

        Raises :class:`querl_sdk.Rejection` for a task that the plugin has no prompt for.
        """

    @abstractmethod
    def parse_rewrite(self, text: str) -> str:
        """The rewrite in a model's response, never empty. Raises :class:`querl_sdk.Rejection` where there is none."""

    @abstractmethod
    def parse_judgement(self, text: str) -> JudgeScore:
        """The judgement in a judge's response.

        Raises :class:`querl_sdk.Rejection` where there is none, or its score is not within 0 to 5: never a guess.
        """
