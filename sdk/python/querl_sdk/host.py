"""Host functions: the run's tokenizer, word segmentation, text encoder, judge and style model.

A plugin may call the interfaces that plugin.toml declares (``host_functions = ["tokens", "words"]``). Results are recorded with the
episode, so that a replay gives the same score. Outside of a component, :func:`querl_sdk.testing.host_functions` replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .types import CallFailure, Message, Rejection, StyleProbability


class HostCallError(Rejection):
    """A host function failed. If not caught, the episode is rejected with a code such as ``judge_failed`` or ``judge_not_configured``."""

    def __init__(self, interface: str, failure: CallFailure | None = None) -> None:
        name = interface.replace("-", "_")
        if failure is None:
            super().__init__(f"{name}_not_configured", f"the run has nothing for the host functions `{interface}`")
        else:
            super().__init__(f"{name}_failed", failure.message)
        self.failure = failure
        """The failed call; ``None`` if the run has no such service or model."""


def _not_declared(interface: str) -> TypeError:
    """The error of a call of an interface that plugin.toml does not declare."""
    return TypeError(f"`querl_sdk.host` needs the interface `{interface}`; add it to host_functions in plugin.toml")


def count_tokens(text: str) -> int:
    """Number of tokens of the text in the policy's tokenizer, without special tokens. Needs ``tokens``."""
    return int(_call("tokens", "count_tokens", text))


def split_tokens(text: str) -> list[str]:
    """The tokens of the text in the policy's tokenizer, as strings. Needs ``tokens``."""
    return list(_call("tokens", "split_tokens", text))


def words(text: str) -> list[str]:
    """Word segmentation by jieba with the run's user dictionary, without whitespace and punctuation. Needs ``words``."""
    return list(_call("words", "segment_words", text))


def embed(texts: Sequence[str]) -> list[list[float]]:
    """One L2-normalised embedding per text, so that a dot product is the cosine similarity. At most 64 texts. Needs ``similarity``."""
    return list(_call("similarity", "embed", list(texts)))


def ask_judge(messages: Sequence[Message]) -> str:
    """The response of the run's judge model. The response cache and the budget apply. Needs ``judge``."""
    return str(_call("judge", "ask_judge", list(messages)))


def classify(turns: Sequence[Message]) -> list[StyleProbability]:
    """The style model's class probabilities for the last question with its answer. Needs ``style-model``."""
    return list(_call("style-model", "classify_style", list(turns)))


def _not_there(interface: str, function: str, argument: Any) -> Any:
    raise HostCallError(interface)


Receiver = Callable[[str, str, Any], Any]
_call: Receiver = _not_there


def _send_to(call: Receiver) -> Receiver:
    """Replaces the receiver of calls (interface, function, argument). Returns the previous one."""
    global _call
    before, _call = _call, call
    return before
