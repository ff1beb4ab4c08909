"""Prompt plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum

from .settings import Settings
from .types import Context, JudgeScore, Message


class PromptTask(Enum):
    """The purpose of a prompt. The SDK rejects any other task with the code ``unknown_task``."""

    TEACHER_REWRITE = "teacher_rewrite"
    """The teacher model's prompt: long, with the tenant's rules."""
    POLICY_REWRITE = "policy_rewrite"
    """The policy's prompt: short, because the policy learns the rules in training."""
    JUDGE = "judge"
    """The judge model's prompt. Its response is parsed by ``parse_judgement``."""


@dataclass(slots=True)
class PromptInput:
    """The variables of a prompt."""

    query: str = ""
    """The user's query."""
    context: Context = field(default_factory=Context)
    """User profile and conversation history."""
    rewrite: str | None = None
    """The rewrite to judge; ``None`` for the rewrite tasks."""


class Prompt(ABC):
    """Builds a tenant's prompts and parses the responses."""

    def __init__(self, settings: Settings) -> None:
        """Reads all settings of the plugin. Must read every key unconditionally: the reads define the plugin's description.

        Raises :class:`querl_sdk.SettingError` for an invalid value.
        """

    @abstractmethod
    def messages(self, task: PromptTask, input: PromptInput) -> list[Message]:
        """The messages of the prompt for one task. The last message has the role user; only the first may be a system message.

        Raises :class:`querl_sdk.Rejection` for a task that the plugin has no prompt for.
        """

    @abstractmethod
    def parse_rewrite(self, text: str) -> str:
        """The rewrite in a model's response; not empty. Raises :class:`querl_sdk.Rejection` if the response contains none."""

    @abstractmethod
    def parse_judgement(self, text: str) -> JudgeScore:
        """The score (0 to 5) and reason in a judge's response.

        Raises :class:`querl_sdk.Rejection` if the response contains no score, or one outside of 0 to 5. Never guess a score.
        """
