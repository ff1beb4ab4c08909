"""Reads episodes, samples and dialogues from the JSON that querl writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..filter import Sample
from ..prompt import PromptInput
from ..style import Dialogue
from ..types import Context, Episode, Hit, Message

_FORMATS = (2, 3)


def compact(value: Any) -> str:
    """The JSON of a value in a message, without spaces, as in all kits."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Fields:
    """The keys of a JSON object. `end` raises an error for keys that were not read."""

    def __init__(self, value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"`{place}` is {compact(value)}; expected an object")
        self._left = dict(value)
        self._taken: list[str] = []
        self._place = place

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def take(self, key: str) -> Any:
        """The value of `key`; an error if it is missing."""
        self._taken.append(key)
        if key not in self._left:
            raise ValueError(f"`{key}` is missing in `{self._place}`")
        return self._left.pop(key)

    def optional(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default`."""
        self._taken.append(key)
        value = self._left.pop(key, None)
        return default if value is None else value

    def known(self, *keys: str) -> dict[str, Any]:
        """The subset of these keys that have a value."""
        return {key: value for key in keys if (value := self.optional(key)) is not None}

    def end(self) -> None:
        """Raises an error if a key was not read."""
        for key in self._left:
            known = "`, `".join(self._taken)
            raise ValueError(f"unknown key `{key}` in `{self._place}`, expected one of `{known}`")


def lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields location (`FILE:LINE`) and value of each line that is not blank."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path.name}:{number}"
                try:
                    yield place, json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{place}: not JSON: {error}") from None


def read_episodes(path: Path | str) -> list[Episode]:
    """Reads the episodes of an ``episodes.jsonl``, recorded by a run or written by hand."""
    episodes = []
    for place, value in lines(Path(path)):
        if not isinstance(value, dict) or value.get("format") not in _FORMATS:
            raise ValueError(f'{place}: expected "format": {_FORMATS[-1]}')
        try:
            episodes.append(episode(value["episode"], default_id=f"line-{place.rsplit(':', 1)[-1]}", format=value["format"]))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{place}: {error}") from None
    return episodes


def episode(value: Any, default_id: str = "", format: int = _FORMATS[-1]) -> Episode:
    """Reads a recorded episode. Fills in missing ids, ranks and texts. In format 2 a missing `retrieval` means that nothing was found."""
    fields = Fields(value, "episode")
    id = fields.optional("id", default_id)
    group, _, index = id.rpartition("/")
    has_index = bool(group) and index.isdigit()
    read = {
        "id": id,
        "group_id": fields.optional("group_id", group if has_index else id),
        "sample_index": fields.optional("sample_index", int(index) if has_index else 0),
        **fields.known("step", "split", "gold_ids", "columns", "prompt", "response"),
        "query": fields.take("query"),
        "context": _context(fields.optional("context", {})),
        "policy": _candidate(fields.take("policy"), "policy", format),
    }
    if (baseline := fields.optional("baseline")) is not None:
        read["baseline"] = _candidate(baseline, "baseline", format)
    fields.end()
    return Episode.from_json(read)


def sample(value: Any, default_id: str = "") -> Sample:
    """A sample of a golden case."""
    fields = Fields(value, "samples")
    columns = {"columns": fields.optional("columns", {})}
    read = Sample(
        id=fields.optional("id", default_id),
        original_query=fields.take("original_query"),
        rewritten_query=fields.take("rewritten_query"),
        context=Context.from_json(_context(fields.optional("context", {}))),
        hits=[Hit.from_json(hit) for hit in _hits(fields.optional("hits", []))],
        columns=Episode.from_json(columns).columns,
    )
    fields.end()
    return read


def prompt_input(value: Any) -> PromptInput:
    """The input of a golden case for a prompt."""
    fields = Fields(value, "input")
    context = Context.from_json(_context(fields.optional("context", {})))
    read = PromptInput(query=fields.take("query"), context=context, rewrite=fields.optional("rewrite"))
    fields.end()
    return read


def host_call(value: Any) -> dict[str, Any]:
    """A recorded call of a host function."""
    fields = Fields(value, "calls")
    read = {"request": fields.take("request"), "response": fields.take("response")}
    fields.optional("plugin")
    fields.end()
    return read


def dialogue(value: Any, default_id: str = "") -> Dialogue:
    """A dialogue of a golden case."""
    fields = Fields(value, "dialogue")
    turns = [Message.from_json(turn) for turn in fields.take("turns")]
    read = Dialogue(id=fields.optional("id", default_id), turns=turns)
    fields.end()
    return read


def _context(value: Any) -> dict[str, str]:
    """Reads a context. Format 2 has empty strings for unknown values."""
    fields = Fields(value, "context")
    read = {key: text for key, text in fields.known("user_profile", "history_summary").items() if text}
    fields.end()
    return read


def _candidate(value: Any, place: str, format: int) -> dict[str, Any]:
    fields = Fields(value, place)
    read = fields.known("style", "finish_reason")
    read |= {key: known for key, known in fields.known("rewrite", "n_tokens").items() if known and str(known).strip()}
    if (retrieval := fields.optional("retrieval", {"hits": []} if format == 2 else None)) is not None:
        read["retrieval"] = _either(retrieval, "hits", _hits)
    judgement = fields.optional("judgement", "not_sampled")
    if judgement != "not_sampled":
        read["judgement"] = _either(judgement, "scored", lambda judged: {"reason": "", **judged})
    truncated = fields.optional("truncated")
    if truncated or (truncated is not None and "n_tokens" in read):
        read.setdefault("finish_reason", "length" if truncated else "stop")
    fields.end()
    return read


def _either(value: Any, result: str, read: Any) -> dict[str, Any]:
    """Reads a result, stored in the key `result`, or a failure, stored in the key `failed`."""
    fields = Fields(value, result)
    form = {"failed": {"message": "", **fields.take("failed")}} if "failed" in fields else {result: read(fields.take(result))}
    fields.end()
    return form


def _hits(values: Any) -> list[dict[str, Any]]:
    return [_hit(value, position) for position, value in enumerate(values, 1)]


def _hit(value: Any, position: int) -> dict[str, Any]:
    fields = Fields(value, "hits")
    read = {
        **{key: known for key, known in fields.known("id", "retrieval_score").items() if known != ""},
        "text": fields.optional("text", ""),
        "reranker_score": fields.take("reranker_score"),
        "rank": fields.optional("rank", 0) or position,
    }
    fields.end()
    return read
