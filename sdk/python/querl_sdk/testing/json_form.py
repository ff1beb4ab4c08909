"""Episodes, samples and dialogues as querl writes them in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..filter import Sample
from ..prompt import PromptInput
from ..reward import Episode
from ..style import Dialogue
from ..types import CallFailure, Candidate, Context, FailureKind, Hit, JudgeScore, Message, Role, StyleProbability

_FORMAT = 2


class Fields:
    """The keys of a JSON object. Those that nobody takes are refused at the end."""

    def __init__(self, value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"`{place}` is {json.dumps(value, ensure_ascii=False)}; expected an object")
        self._left = dict(value)
        self._place = place

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def take(self, key: str) -> Any:
        """The value under `key`, which has to be there."""
        if key not in self._left:
            raise ValueError(f"`{key}` is missing in `{self._place}`")
        return self._left.pop(key)

    def optional(self, key: str, default: Any = None) -> Any:
        """The value under `key`, or `default`."""
        value = self._left.pop(key, None)
        return default if value is None else value

    def end(self) -> None:
        """Every key was taken."""
        for key in self._left:
            raise ValueError(f"unknown key `{key}` in `{self._place}`")


def lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Place and value of each line of a file that is not blank."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path.name}:{number}"
                try:
                    yield place, json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{place}: not JSON: {error}") from None


def read_episodes(path: Path | str) -> list[Episode]:
    """The episodes of a file that a run recorded (``episodes.jsonl``) or somebody wrote by hand."""
    episodes = []
    for place, value in lines(Path(path)):
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise ValueError(f'{place}: expected "format": {_FORMAT}')
        episodes.append(episode(value["episode"]))
    return episodes


def episode(value: Any, default_id: str = "") -> Episode:
    """An episode as recorded."""
    fields = Fields(value, "episode")
    read = Episode(
        id=fields.optional("id", default_id),
        query=fields.take("query"),
        context=_context(fields.optional("context", {})),
        gold_ids=fields.optional("gold_ids", []),
        policy=_candidate(fields.take("policy"), "policy"),
        baseline=_candidate(fields.take("baseline"), "baseline"),
    )
    fields.end()
    return read


def sample(value: Any, default_id: str = "") -> Sample:
    """A sample of a golden case."""
    fields = Fields(value, "samples")
    read = Sample(
        id=fields.optional("id", default_id),
        original_query=fields.take("original_query"),
        rewritten_query=fields.take("rewritten_query"),
        context=_context(fields.optional("context", {})),
        hits=_hits(fields.optional("hits", [])),
    )
    fields.end()
    return read


def prompt_input(value: Any) -> PromptInput:
    """The input of a golden case for a prompt."""
    fields = Fields(value, "input")
    context = _context(fields.optional("context", {}))
    read = PromptInput(query=fields.take("query"), context=context, rewrite=fields.optional("rewrite"))
    fields.end()
    return read


def dialogue(value: Any, default_id: str = "") -> Dialogue:
    """A dialogue of a golden case."""
    fields = Fields(value, "dialogue")
    read = Dialogue(id=fields.optional("id", default_id), turns=[message(turn) for turn in fields.take("turns")])
    fields.end()
    return read


def message(value: Any) -> Message:
    """A chat message."""
    return Message(Role(value["role"]), value["content"])


def distribution(values: Any) -> dict[str, float]:
    """A style distribution, by label."""
    return {value["label"]: value["probability"] for value in values}


def _context(value: Any) -> Context:
    fields = Fields(value, "context")
    read = Context(fields.optional("user_profile", ""), fields.optional("history_summary", ""))
    fields.end()
    return read


def _candidate(value: Any, place: str) -> Candidate:
    fields = Fields(value, place)
    style = fields.optional("style")
    read = Candidate(
        rewrite=fields.take("rewrite"),
        retrieval=_either(fields.optional("retrieval", {"hits": []}), "hits", _hits),
        judgement=_judgement(fields.optional("judgement", "not_sampled")),
        style=None if style is None else [StyleProbability(each["label"], each["probability"]) for each in style],
        n_tokens=fields.optional("n_tokens", 0),
        truncated=fields.optional("truncated", False),
    )
    fields.end()
    return read


def _judgement(value: Any) -> JudgeScore | CallFailure | None:
    if value == "not_sampled":
        return None
    judged: JudgeScore | CallFailure = _either(value, "scored", lambda said: JudgeScore(said["score"], said.get("reason", "")))
    return judged


def _either(value: Any, answered: str, read: Callable[[Any], Any]) -> Any:
    """An answer under its name, or a failure under `failed`."""
    fields = Fields(value, answered)
    if "failed" in fields:
        failure = fields.take("failed")
        answer = CallFailure(FailureKind(failure["kind"]), failure.get("message", ""))
    else:
        answer = read(fields.take(answered))
    fields.end()
    return answer


def _hits(values: Any) -> list[Hit]:
    return [_hit(value, position) for position, value in enumerate(values, 1)]


def _hit(value: Any, position: int) -> Hit:
    fields = Fields(value, "hits")
    read = Hit(
        id=fields.optional("id", ""),
        text=fields.optional("text", ""),
        reranker_score=fields.take("reranker_score"),
        retrieval_score=fields.optional("retrieval_score"),
        rank=fields.optional("rank", 0) or position,
    )
    fields.end()
    return read
