"""Scores recorded episodes natively, for `querl plugin dev`: one process for each save, so that every module is imported afresh.

`python3 -m querl_sdk.dev FOLDER EPISODES SETTINGS RESULTS`: the plugin's folder, a file of recorded episodes of format 3, the settings as JSON,
and the file to write. A line of results is a JSON object: first `{"range": [low, high]}`, then for each episode `{"scored": ...}`,
`{"rejected": ...}` or `{"fault": {"message", "file", "line"}}`, with its log lines under `log`, and last `{"seconds": ...}`, the time that
scoring took. Where the plugin cannot be imported or refuses a setting, `{"refused": {"message", "file", "line"}}` is the only line.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import host, log
from .description import describe
from .recording import recorded
from .registry import exported
from .reward import Score
from .settings import SettingError, Settings
from .types import Episode, Rejection

_SCORERS = ("reward", "group-reward")


def main(folder: str, episodes: str, settings: str, results: str) -> None:
    """Writes the results."""
    gc.disable()  # reading episodes makes many objects and no cycles
    with open(results, "w", encoding="utf-8") as file:
        for result in _results(Path(folder), Path(episodes), json.loads(settings)):
            file.write(json.dumps(result, ensure_ascii=False) + "\n")


def _results(folder: Path, path: Path, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        importlib.import_module("plugin")
        classes = exported()
        kind = next((kind for kind in _SCORERS if kind in classes), None)
        if kind is None:
            raise TypeError("plugin.py exports no reward")
        inputs = describe(classes).inputs
        plugin = classes[kind](Settings(settings))
        low, high = plugin.range()
    except SettingError as error:
        yield {"refused": {"message": str(error)}}
        return
    except BaseException as error:
        yield {"refused": _place(error, folder)}
        return
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    groups: dict[str, list[int]] = {}
    for index, line in enumerate(lines):
        group = line["episode"]["group_id"] if kind == "group-reward" else str(index)
        groups.setdefault(group, []).append(index)
    yield {"range": [float(low), float(high)]}
    written: list[str] = []
    log._send_to(lambda level, message: written.append(f"{level}: {message}"))
    results: list[dict[str, Any]] = [{} for _ in lines]
    seconds = 0.0
    for members in groups.values():
        episodes = [Episode.from_json(_declared(lines[index]["episode"], inputs)) for index in members]
        host._send_to(recorded([call for index in members for call in lines[index].get("calls", [])]))
        started = time.perf_counter()
        outcomes = _outcomes(plugin, kind, episodes, folder)
        seconds += time.perf_counter() - started
        for index, outcome in zip(members, outcomes):
            results[index] = outcome
        if written:
            results[members[0]]["log"] = written[:]
            written.clear()
    yield from results
    yield {"seconds": seconds}


def _declared(episode: dict[str, Any], inputs: dict[str, bool]) -> dict[str, Any]:
    """An episode without the parts that the plugin does not declare, as the host hands it over."""
    for part in ("response", "prompt", "columns", "baseline"):
        if part not in inputs:
            episode.pop(part, None)
    for side in ("policy", "baseline"):
        for part in ("retrieval", "judgement", "style"):
            if part not in inputs and side in episode:
                episode[side].pop(part, None)
    return episode


def _outcomes(plugin: Any, kind: str, episodes: list[Episode], folder: Path) -> list[dict[str, Any]]:
    try:
        outcomes = [plugin.score(episodes[0])] if kind == "reward" else list(plugin.score_group(episodes))
    except Rejection as rejection:
        outcomes = [rejection] * len(episodes)
    except (Exception, SystemExit) as error:
        return [{"fault": _place(error, folder)} for _ in episodes]
    if len(outcomes) != len(episodes):
        message = f"score_group() gave {len(outcomes)} results for {len(episodes)} episodes; expected one for each"
        return [{"fault": {"message": message}} for _ in episodes]
    return [_written(outcome) for outcome in outcomes]


def _written(outcome: object) -> dict[str, Any]:
    if isinstance(outcome, Rejection):
        return {"rejected": {"code": outcome.code, "detail": outcome.detail}}
    if not isinstance(outcome, Score):
        return {"fault": {"message": f"the result is {outcome!r}; expected a Score or a Rejection"}}
    for name, value in {"total": outcome.total, **outcome.components}.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return {"fault": {"message": f"`{name}` is {value!r}; expected a finite number"}}
    components = [{"name": name, "value": float(value)} for name, value in outcome.components.items()]
    return {"scored": {"total": float(outcome.total), "components": components}}


def _place(error: BaseException, folder: Path) -> dict[str, Any]:
    """The message, and the innermost line of the author's own source."""
    message = traceback.format_exception_only(error)[-1].strip()
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    for file, line in reversed(frames):
        path = Path(file)
        if path.is_relative_to(folder) and not {"vendor", ".venv"} & set(path.relative_to(folder).parts):
            return {"message": message, "file": str(path.relative_to(folder)), "line": line}
    return {"message": message}


if __name__ == "__main__":
    main(*sys.argv[1:])
