"""Scores recorded episodes natively, for `querl plugin dev`: one process for each save, so that every module is imported afresh.

`python3 -m querl_sdk.dev FOLDER EPISODES SETTINGS RESULTS`: the plugin's folder, a file of recorded episodes, the settings as JSON, and the
file to write. A line of results is a JSON object: first `{"range": [low, high]}`, then for each episode `{"scored": ...}`,
`{"rejected": ...}` or `{"fault": {"message", "file", "line"}}`, with its log lines under `log`, and last `{"seconds": ...}`, the time that
scoring took. Where the plugin cannot be imported or refuses a setting, `{"refused": {"message", "file", "line"}}` is the only line.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import log
from .registry import exported
from .reward import Reward, Score
from .settings import SettingError, Settings
from .testing.json_form import read_episodes
from .types import Rejection


def main(folder: str, episodes: str, settings: str, results: str) -> None:
    """Writes the results."""
    sys.path.insert(0, folder)
    with open(results, "w", encoding="utf-8") as file:
        for result in _results(Path(folder), Path(episodes), json.loads(settings)):
            file.write(json.dumps(result, ensure_ascii=False) + "\n")


def _results(folder: Path, path: Path, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        importlib.import_module("plugin")
        reward = exported().reward
        if reward is None:
            raise TypeError("plugin.py exports no reward")
        plugin = reward(Settings(settings))
        low, high = plugin.range()
    except SettingError as error:
        yield {"refused": {"message": str(error)}}
        return
    except BaseException as error:
        yield {"refused": _place(error, folder)}
        return
    given = read_episodes(path)
    yield {"range": [float(low), float(high)]}
    written: list[str] = []
    log._send_to(lambda level, message: written.append(f"{level}: {message}"))
    seconds = 0.0
    for episode in given:
        started = time.perf_counter()
        result = _scored(plugin, episode, folder)
        seconds += time.perf_counter() - started
        if written:
            result["log"] = written[:]
            written.clear()
        yield result
    yield {"seconds": seconds}


def _scored(plugin: Reward, episode: Any, folder: Path) -> dict[str, Any]:
    try:
        score = plugin.score(episode)
    except Rejection as rejection:
        return {"rejected": {"code": rejection.code, "detail": rejection.detail}}
    except Exception as error:
        return {"fault": _place(error, folder)}
    if not isinstance(score, Score):
        return {"fault": {"message": f"score() returned {score!r}; expected a Score, or a raised Rejection"}}
    numbers = {"total": score.total, **score.components}
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return {"fault": {"message": f"`{name}` is {value!r}; expected a finite number"}}
    components = [{"name": name, "value": float(value)} for name, value in score.components.items()]
    return {"scored": {"total": float(score.total), "components": components}}


def _place(error: BaseException, folder: Path) -> dict[str, Any]:
    """The message, and the innermost line of the author's own source."""
    message = traceback.format_exception_only(error)[-1].strip()
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    for file, line in reversed(frames):
        path = Path(file)
        if path.is_relative_to(folder) and "vendor" not in path.relative_to(folder).parts:
            return {"message": message, "file": str(path.relative_to(folder)), "line": line}
    return {"message": message}


if __name__ == "__main__":
    main(*sys.argv[1:])
