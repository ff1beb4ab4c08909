"""Scores recorded episodes natively, for `querl plugin dev`, which starts a new process after each save of the source.

`python3 -m querl_sdk.dev FOLDER EPISODES SETTINGS RESULTS`: the plugin's folder, a file of recorded episodes of format 3, the settings as JSON,
and the file to write. A line of results is a JSON object: first `{"range": [low, high]}`; `{"begun": id}` before each episode or group, as
it begins; then for each episode `{"scored": ...}`, `{"rejected": ...}` or `{"fault": {"message", "file", "line"}}`, with its log lines under
`log`; and last `{"seconds": ...}`, the time that scoring took. Where the plugin cannot be imported or refuses a setting,
`{"refused": {"message", "file", "line"}}` is the only line. A log line of the level `component` names what a component cannot do. The
environment variable `QUERL_HOST_FUNCTIONS` has the interfaces that plugin.toml declares.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import host, log
from .description import describe, range_of
from .recording import recorded
from .registry import exported
from .reward import Score
from .settings import SettingError, Settings
from .types import Episode, Rejection

_SCORERS = ("reward", "group-reward")

LIMIT_S = 5
"""Limit of CPU time in seconds for the start and for each episode or group; exceeding it is a fault. The wall-clock limit is ten times as long."""

_MAX_STOPPED = 3
"""Scoring stops after this many timeouts."""

_PERIOD_S = 0.1


class _StillRuns(BaseException):
    """Derived from `BaseException`, because a plugin may catch `Exception`."""

    def __str__(self) -> str:
        return f"still ran after {LIMIT_S} s: an endless loop, or a regular expression that tries too many ways"


_MAX_REMARKS = 5
"""Maximum number of remarks with one verb, for a plugin that opens a file per episode."""

_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
_FILES = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.rmdir")


class _Watch:
    """Context manager around the plugin's code: enforces the time limit, and logs operations that a component cannot do."""

    def __init__(self, folder: Path) -> None:
        self.is_on = False
        self._folder = folder
        self._cpu = self._wall = 0.0
        self._seen: dict[str, set[str]] = {}
        self.remark: Callable[[str], None] | None = None
        """Logs an operation that a component cannot do; set from the first episode on."""
        sys.addaudithook(self._audit)
        if hasattr(signal, "setitimer"):  # Windows has no timer signals: no time limit there
            signal.signal(signal.SIGALRM, self._check)
            signal.setitimer(signal.ITIMER_REAL, _PERIOD_S, _PERIOD_S)

    def __enter__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.monotonic()
        self.is_on = True

    def __exit__(self, *_: object) -> None:
        self.is_on = False

    def close(self) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _check(self, *_: object) -> None:
        is_over = time.process_time() - self._cpu > LIMIT_S or time.monotonic() - self._wall > 10 * LIMIT_S
        if self.is_on and is_over:
            raise _StillRuns

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on or self.remark is None:
            return
        remark = ""
        if event == "import":
            remark = f"imports `{args[0]}` in a call: a component has only the modules that were loaded when it was built; import it at the top of plugin.py"
        elif event in _FILES and not str(args[0]).endswith((".py", ".pyc")):
            verb = "opens" if event == "open" else "uses"
            remark = f"{verb} `{args[0]}`: a component has no files; have the data in a module next to plugin.py"
        elif event.startswith("socket."):
            remark = "calls the network: a component has none"
        elif event in _PROCESSES:
            remark = "starts a process: a component cannot"
        seen = self._seen.setdefault(remark.split(" ")[0], set())
        if remark and remark not in seen and len(seen) < _MAX_REMARKS and self._is_of_plugin():
            seen.add(remark)
            self.remark(remark)

    def _is_of_plugin(self) -> bool:
        """True if the plugin's code, or a function that it calls, makes the audited operation. False for what an import does in turn."""
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith("<frozen importlib"):
                return False
            if _own(file, self._folder):
                return True
            frame = frame.f_back
        return False


def main(folder: str, episodes: str, settings: str, results: str) -> None:
    """Scores the episodes and writes the results."""
    gc.disable()  # episodes are many objects without reference cycles
    watch = _Watch(Path(folder))
    with open(results, "w", encoding="utf-8") as file, contextlib.closing(watch):
        for result in _results(Path(folder), Path(episodes), json.loads(settings), watch):
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
            if "begun" in result:
                file.flush()  # the plugin may end the process


def _results(folder: Path, path: Path, settings: dict[str, Any], watch: _Watch) -> Iterator[dict[str, Any]]:
    try:
        with watch:
            importlib.import_module("plugin")
            classes = exported()
            kind = next((kind for kind in _SCORERS if kind in classes), None)
            if kind is None:
                raise TypeError("plugin.py exports no reward")
            inputs = describe(classes).inputs
            plugin = classes[kind](Settings(settings))
            low, high = range_of(plugin)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"declares the range {low} to {high}; expected two finite numbers, the first below the second")
    except SettingError as error:
        yield {"refused": {"message": str(error)}}
        return
    except BaseException as error:
        watch.is_on = False
        yield {"refused": _place(error, folder)}
        return
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    groups: dict[str, list[int]] = {}
    for index, line in enumerate(lines):
        group = line["episode"]["group_id"] if kind == "group-reward" else str(index)
        groups.setdefault(group, []).append(index)
    yield {"range": [low, high]}
    written: list[str] = []
    log._send_to(lambda level, message: written.append(f"{level}: {message}"))
    watch.remark = lambda message: written.append(f"component: {message}")
    results: list[dict[str, Any]] = [{} for _ in lines]
    seconds, n_stopped = 0.0, 0
    for members in groups.values():
        if n_stopped == _MAX_STOPPED:
            message = f"not scored: {n_stopped} before it still ran after {LIMIT_S} s"
            results = [result or {"fault": {"message": message}} for result in results]
            break
        yield {"begun": lines[members[0]]["episode"]["id"]}
        episodes = [Episode.from_json(_declared(lines[index]["episode"], inputs)) for index in members]
        host._send_to(_declared_only(recorded([call for index in members for call in lines[index].get("calls", [])])))
        started = time.perf_counter()
        try:
            with watch:
                outcomes = _outcomes(plugin, kind, episodes, folder)
        except _StillRuns as error:
            # If the timer raises within `__exit__`, the watch stays on and would raise again outside of `try`.
            watch.is_on = False
            n_stopped += 1
            outcomes = [{"fault": _place(error, folder)} for _ in episodes]
        seconds += time.perf_counter() - started
        for index, outcome in zip(members, outcomes):
            results[index] = outcome
        if written:
            results[members[0]]["log"] = written[:]
            written.clear()
    yield from results
    yield {"seconds": seconds}


def _declared(episode: dict[str, Any], inputs: dict[str, bool]) -> dict[str, Any]:
    """An episode without the inputs that the plugin does not declare, as the host passes it."""
    for part in ("response", "prompt", "columns", "baseline"):
        if part not in inputs:
            episode.pop(part, None)
    for side in ("policy", "baseline"):
        for part in ("retrieval", "judgement", "style"):
            if part not in inputs and side in episode:
                episode[side].pop(part, None)
    return episode


def _declared_only(call: host.Receiver) -> host.Receiver:
    """Refuses a host function that plugin.toml does not declare, with the same message as in the component."""
    declared = os.environ.get("QUERL_HOST_FUNCTIONS")

    def checked(interface: str, function: str, argument: Any) -> Any:
        if declared is not None and interface not in declared.split():
            raise host._not_declared(interface)
        return call(interface, function, argument)

    return checked


def _outcomes(plugin: Any, kind: str, episodes: list[Episode], folder: Path) -> list[dict[str, Any]]:
    try:
        try:
            outcomes = [plugin.score(episodes[0])] if kind == "reward" else list(plugin.score_group(episodes))
        except Rejection as rejection:
            outcomes = [rejection] * len(episodes)
        if len(outcomes) != len(episodes):
            message = f"score_group() gave {len(outcomes)} results for {len(episodes)} episodes; expected one for each"
            return [{"fault": {"message": message}} for _ in episodes]
        return [_written(outcome) for outcome in outcomes]
    except (Exception, SystemExit) as error:
        return [{"fault": _place(error, folder)} for _ in episodes]


def _written(outcome: object) -> dict[str, Any]:
    if isinstance(outcome, Rejection):
        return {"rejected": {"code": outcome.code, "detail": outcome.detail}}
    if not isinstance(outcome, Score):
        return {"fault": {"message": f"the result is {outcome!r}; expected a Score or a Rejection"}}
    for name in outcome.components:
        if not isinstance(name, str):
            return {"fault": {"message": f"the component name is {name!r}; expected a text"}}
    for name, value in {"total": outcome.total, **outcome.components}.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return {"fault": {"message": f"`{name}` is {value!r}; expected a finite number"}}
    components = [{"name": name, "value": float(value)} for name, value in outcome.components.items()]
    return {"scored": {"total": float(outcome.total), "components": components}}


def _place(error: BaseException, folder: Path) -> dict[str, Any]:
    """The message of an exception, with file and line of the innermost frame in the plugin's own source."""
    message = str(error) if isinstance(error, _StillRuns) else traceback.format_exception_only(error)[-1].strip()
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    for file, line in reversed(frames):
        if own := _own(file, folder):
            return {"message": message, "file": str(own), "line": line}
    return {"message": message}


def _own(file: str, folder: Path) -> Path | None:
    """The path of a source file of the plugin in its folder; None for other files."""
    path = Path(file)
    if path.is_relative_to(folder) and not {"vendor", ".venv"} & set(path.relative_to(folder).parts):
        return path.relative_to(folder)
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
