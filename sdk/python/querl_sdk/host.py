"""Host functions: the run's tokenizer, word segmentation, text encoder, judge and style model.

plugin.toml declares what a plugin calls (``host_functions = ["tokens", "words"]``). Results are recorded with the episode. Outside of a
component, :func:`querl_sdk.testing.host_functions` says what the functions return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .types import CallFailure, Message, Rejection, StyleProbability


class HostCallError(Rejection):
    """A host function gave no result. Where nobody catches it, the episode is rejected: ``judge_failed``, ``judge_not_configured``."""

    def __init__(self, interface: str, failure: CallFailure | None = None) -> None:
        name = interface.replace("-", "_")
        if failure is None:
            super().__init__(f"{name}_not_configured", f"the run has nothing for the host functions `{interface}`")
        else:
            super().__init__(f"{name}_failed", failure.message)
        self.failure = failure
        """``None`` where the run has no such service or model."""


def _not_declared(interface: str) -> TypeError:
    """The error of a call of an interface that plugin.toml does not declare."""
    return TypeError(f"`querl_sdk.host` needs the interface `{interface}`; add it to host_functions in plugin.toml")


def count_tokens(text: str) -> int:
    """Number of tokens of the text by the policy's tokenizer, without special tokens. Needs ``tokens``."""
    return int(_call("tokens", "count_tokens", text))


def split_tokens(text: str) -> list[str]:
    """The tokens as texts, in order, by the policy's tokenizer. Needs ``tokens``."""
    return list(_call("tokens", "split_tokens", text))


def words(text: str) -> list[str]:
    """The words in order, without blanks and punctuation: jieba with the run's user dictionary. Needs ``words``."""
    return list(_call("words", "segment_words", text))


def embed(texts: Sequence[str]) -> list[list[float]]:
    """One vector of length 1 per text, at most 64 texts: a dot product is the cosine similarity. Needs ``similarity``."""
    return list(_call("similarity", "embed", list(texts)))


def ask_judge(messages: Sequence[Message]) -> str:
    """The response of the configured judge, through cache and budget. Needs ``judge``."""
    return str(_call("judge", "ask_judge", list(messages)))


def classify(turns: Sequence[Message]) -> list[StyleProbability]:
    """The style distribution of the last question with its response. Needs ``style-model``."""
    return list(_call("style-model", "classify_style", list(turns)))


def _not_there(interface: str, function: str, argument: Any) -> Any:
    raise HostCallError(interface)


Receiver = Callable[[str, str, Any], Any]
_call: Receiver = _not_there


def _send_to(call: Receiver) -> Receiver:
    """Has calls (interface, function, argument) go elsewhere. Returns where they went before."""
    global _call
    before, _call = _call, call
    return before
