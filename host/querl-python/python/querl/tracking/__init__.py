"""Mirrors a run to an experiment tracker, during training or afterwards: metrics, sample rewrites and evaluation results.

`querl track` and `[tracking]` of a configuration run `python -m querl.track`, which only reads the run's own files. It
saves its position in `tracking/TRACKER.json` of the run directory, so that the next start continues the same tracker run.
docs/tracking.md describes names and behaviour. Each tracker has a module with a subclass of `Tracker`.
"""

from __future__ import annotations

import abc
import importlib
import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .._figures import figures
from ._files import FolderLock, GrowingLines, Ledger, State, digest_of, is_in_use, read_config

#: Library name of each tracker, and the name of its `Tracker` subclass.
TRACKERS = {"wandb": "Wandb", "mlflow": "Mlflow", "swanlab": "Swanlab", "trackio": "Trackio"}

#: Metrics of `rl` that are also logged under the names that verl uses.
_SOURCE_NAMES = {"policy_loss": "actor/pg_loss", "value_loss": "critic/vf_loss", "clip_fraction": "actor/pg_clipfrac"}
#: Stages with one line in `metrics.jsonl`. A new run of the stage replaces the line.
_ONE_LINE_STAGES = ("rewrite", "validate", "convert", "eval")
#: Polling interval, in seconds.
_POLL_S = 1.0
#: First and longest wait before a failed tracker is retried, in seconds (exponential backoff).
_RETRY_S = (5.0, 60.0)

#: Columns of a table of sample rewrites. `score` is None for a rejection, whose code is in `rejected`. `top1` is the reranker score of the
#: best hit, None without hits.
SAMPLE_COLUMNS = ("step", "query", "rewrite", "teacher", "score", "rejected", "top1")
Sample = tuple[int, str, str, str, float | None, str, float | None]


class TrackingError(Exception):
    """`code` is the exit code: 2 for a usage or configuration error, 1 for a failure of the tracker."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class TrackerRun:
    """The arguments for opening a tracker run."""

    #: The folder `tracking` of the run directory, for files of the tracker.
    folder: Path
    project: str
    name: str
    offline: bool
    #: The resolved configuration of the run.
    config: dict[str, Any]


class Tracker(abc.ABC):
    """An open tracker run. All logged values are finite."""

    #: Name of the library and of its package.
    library: ClassVar[str]
    #: Environment variables that say where the tracker stores runs. Not used in offline mode.
    environment: ClassVar[tuple[str, ...]] = ()
    #: True if logged records are stored only after `flush`.
    is_buffered: ClassVar[bool] = False
    #: True if a killed process may lose the records of its session, and the tracker ignores records that it already has.
    is_logged_again: ClassVar[bool] = False
    #: Id of the tracker run, to open it again.
    id: str

    @abc.abstractmethod
    def __init__(self, run: TrackerRun, id: str | None) -> None:
        """Opens the tracker run `id`; a new one if `id` is None."""

    @abc.abstractmethod
    def metrics(self, record: int, prefix: str, step: int, values: dict[str, float]) -> None:
        """Logs one line of metrics. `record`: number of the record, from 1. The names in `values` begin with `prefix`, empty for `rl`."""

    @abc.abstractmethod
    def samples(self, record: int, step: int, rows: list[Sample]) -> None:
        """Logs a table with the columns `SAMPLE_COLUMNS`."""

    @abc.abstractmethod
    def figures(self, record: int, version: int, values: dict[str, float]) -> None:
        """Logs the results of `eval`. `version` counts evaluations of the run, from 1."""

    def flush(self) -> None:
        """For trackers that are `is_buffered`: blocks until all logged records are stored."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the session and marks the tracker run as finished."""


def tracker_class(name: str) -> type[Tracker]:
    """The `Tracker` subclass for a library. Raises TrackingError if the library is not installed."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        python = sys.executable
        remedy = f"`{python} -m pip install {name}` installs it; the environment variable PYTHON names another Python"
        raise TrackingError(f"{python} does not have the library {name}; {remedy}", code=2) from None
    kind: type[Tracker] = getattr(importlib.import_module(f".{name}", __name__), TRACKERS[name])
    return kind


def values_of(line: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """The prefix and the metrics of a line of `metrics.jsonl`.

    Metrics of `rl` have no prefix; those of other stages have the prefix `STAGE/`. Some are also logged under verl's names.
    Null values are left out.
    """
    values = {name: value for name, value in line.items() if name not in ("stage", "step") and _is_number(value)}
    values.update({name: values[own] for name, own in _SOURCE_NAMES.items() if own in values})
    calls = {count: _sum(values, count) for count in ("calls", "cached", "joined")}
    if calls["calls"] is not None:
        values["api_calls"] = calls["calls"]
        requests = sum(count or 0.0 for count in calls.values())
        if requests:
            values["cache_hit_rate"] = (calls["cached"] or 0.0) / requests
    if "calls/retrieval/calls" in values:
        values["rag_api_calls"] = values["calls/retrieval/calls"]
    prefix = "" if line["stage"] == "rl" else f"{line['stage']}/"
    return prefix, {prefix + name: float(value) for name, value in values.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _sum(values: dict[str, float], count: str) -> float | None:
    """Sum of a counter over all providers; None without providers."""
    found = [value for name, value in values.items() if name.startswith("calls/") and name.endswith(f"/{count}")]
    return sum(found) if found else None


def sample_of(record: dict[str, Any]) -> Sample:
    """The table row for a line of `episodes.jsonl`."""
    episode, outcome = record["episode"], record.get("outcome") or {}
    policy, baseline = episode["policy"], episode.get("baseline") or {}
    hits = (policy.get("retrieval") or {}).get("hits") or []
    score, code = outcome.get("scored", {}).get("total"), outcome.get("rejected", {}).get("code", "")
    top1 = hits[0]["reranker_score"] if hits else None
    return (record.get("step", 0), episode["query"], policy.get("rewrite", ""), baseline.get("rewrite", ""), score, code, top1)


class Mirror:
    """Mirrors one run directory to one tracker."""

    def __init__(
        self, directory: Path, to: str, project: str, name: str | None = None, *, offline: bool = False, n_samples: int = 8
    ) -> None:
        self.directory, self.to, self.project, self.offline, self.n_samples = directory, to, project, offline, n_samples
        self.name = name or directory.resolve().name
        self.kind = tracker_class(to)
        self.folder = directory / "tracking"
        try:
            self.folder.mkdir(exist_ok=True)
            self._lock = FolderLock(self.folder / f"{to}.lock")
        except OSError as error:
            raise TrackingError(f"{self.folder}: cannot be written: {error.strerror}", code=2) from None
        self._state_path = self.folder / f"{to}.json"
        self._metrics = GrowingLines(directory / "metrics.jsonl")
        self._episodes = GrowingLines(directory / "episodes.jsonl")
        self._tracker: Tracker | None = None
        self._n_seen: dict[str, int] = {}
        #: The ledger for which lines were skipped because they may belong to an earlier training. Checked again when it changes.
        self._left_out_with: Ledger | None = None
        self._pending: list[Sample] = []
        self.n_logged = 0

    def begin(self, stop: threading.Event, *, wait: bool) -> bool:
        """Acquires the lock and loads the state. Returns False if `stop` was set while waiting for another process.

        Raises TrackingError if another process mirrors the run and `wait` is False.
        """
        while not self._lock.take():
            if not wait:
                raise TrackingError(f"{self.directory}: another process mirrors this run to {self.to}; wait for its end")
            if stop.wait(_POLL_S):
                return False
        try:
            self.state = State.load(self._state_path)
        except (ValueError, TypeError, KeyError) as error:
            remedy = "remove it to begin a new run there"
            raise TrackingError(f"{self._state_path}: cannot be read: {error}; {remedy}", code=2) from None
        target: dict[str, Any] = {"project": self.project, "name": self.name, "offline": self.offline}
        if not self.offline:
            target |= {variable: os.environ.get(variable) for variable in self.kind.environment}
        if self.state.target != digest_of(target):
            self.state = State(target=digest_of(target))
        elif self.kind.is_logged_again and self.state.session is not None:
            self.state.position = self.state.session
        self.state.session = None
        return True

    def mirror(self, stop: threading.Event, *, follow: bool) -> None:
        """Logs all records that the tracker lacks. With `follow`, repeats until no process uses the run directory or `stop` is set."""
        retry_s = _RETRY_S[0]
        while True:
            is_running = is_in_use(self.directory)
            try:
                self._poll(stop, is_running)
                retry_s = _RETRY_S[0]
            except TrackingError as error:
                # A failure before the first record is reported at once. A later one is probably a temporary network failure: retry.
                if not (follow and is_running and self.n_logged) or stop.is_set():
                    raise
                print(f"warning: {error}; trying again in {retry_s:.0f} s", file=sys.stderr, flush=True)
                self._discard()
                stop.wait(retry_s)
                retry_s = min(2 * retry_s, _RETRY_S[1])
                continue
            if not (follow and is_running) or stop.wait(_POLL_S):
                return

    def close(self) -> None:
        """Ends the session of the tracker and releases the lock."""
        try:
            if self._tracker is not None:
                self._ask(self._tracker.close)
                self.state.session = None
                self.state.save(self._state_path)
        finally:
            self._lock.release()

    def _poll(self, stop: threading.Event, is_running: bool) -> None:
        ledger = self._poll_metrics(stop)
        if self.n_samples and ledger.is_current("rl"):
            self._poll_samples(stop, is_running)
        if ledger.is_finished("eval") and ledger.is_current("eval"):
            self._poll_figures(stop)
        if self._tracker is not None and self._tracker.is_buffered:
            self._ask(self._tracker.flush)
            self.state.save(self._state_path)

    def _poll_metrics(self, stop: threading.Event) -> Ledger:
        while True:
            is_first, lines = self._metrics.read()
            # A stage that runs again removes its lines, changes the ledger and then writes new lines. Reading lines before the ledger
            # makes sure that the lines are not newer than the ledger.
            ledger = Ledger.read(self.directory)
            if lines and self._has_other_inputs(ledger):
                self._begin_again()
            elif self._left_out_with in (None, ledger):
                break
            self._left_out_with = None
            self._metrics.rewind()
        if is_first:
            self._n_seen = {}
        position = self.state.position
        for text in lines:
            if stop.is_set():
                break
            line = json.loads(text)
            stage, digest = line["stage"], digest_of(text)
            number = self._n_seen[stage] = self._n_seen.get(stage, 0) + 1
            if not ledger.is_current(stage):
                self._left_out_with = ledger
                continue
            if stage in _ONE_LINE_STAGES:
                if position.lines.get(stage) == digest:
                    continue
            elif number <= position.n_lines.get(stage, 0):
                continue
            prefix, values = values_of(line)
            self._ask(self._open().metrics, position.n_records + 1, prefix, line["step"], values)
            if stage in _ONE_LINE_STAGES:
                position.lines[stage] = digest
            else:
                position.n_lines[stage] = number
                self.state.inputs[stage] = ledger.inputs(stage)
            self._logged()
        return ledger

    def _has_other_inputs(self, ledger: Ledger) -> bool:
        """True if a training stage with logged lines was started again with other inputs."""
        known = self.state.inputs.items()
        return any(self.state.position.n_lines.get(stage) and ledger.inputs(stage) != inputs for stage, inputs in known)

    def _begin_again(self) -> None:
        """Starts a new tracker run and reads all files from the first line."""
        if self._tracker is not None:
            self._ask(self._tracker.close)
            self._tracker = None
        self.state = State(target=self.state.target, n_runs=self.state.n_runs)
        self._episodes.rewind()

    def _poll_samples(self, stop: threading.Event, is_running: bool) -> None:
        is_first, lines = self._episodes.read()
        if is_first:
            self._pending = []
        for text in lines:
            if b'"split":"validation"' not in text:
                continue
            sample = sample_of(json.loads(text))
            if self._pending and self._pending[0][0] != sample[0]:
                self._log_samples(stop)
            if sample[0] > self.state.position.sample_step:
                self._pending.append(sample)
                if len(self._pending) == self.n_samples:
                    self._log_samples(stop)
        # The table of a validation that is still running may get more rows.
        if self._pending and not is_running:
            self._log_samples(stop)

    def _log_samples(self, stop: threading.Event) -> None:
        rows, self._pending = self._pending, []
        if stop.is_set():
            return
        step, position = rows[0][0], self.state.position
        self._ask(self._open().samples, position.n_records + 1, step, rows)
        position.sample_step = step
        self._logged()

    def _poll_figures(self, stop: threading.Event) -> None:
        try:
            text = (self.directory / "eval.json").read_bytes()
        except FileNotFoundError:
            return
        digest, position = digest_of(text), self.state.position
        if digest == position.figures or stop.is_set():
            return
        values: dict[str, float] = {}
        for figure in figures(json.loads(text)):
            name = f"eval/{figure['of']}/{figure['metric']}"
            values[name] = float(figure["mean"])
            values |= {f"{name}/{bound}": float(figure[bound]) for bound in ("low", "high") if _is_number(figure.get(bound))}
        self._ask(self._open().figures, position.n_records + 1, position.n_figures + 1, values)
        position.figures, position.n_figures = digest, position.n_figures + 1
        self._logged()

    def _open(self) -> Tracker:
        if self._tracker is None:
            n_runs = self.state.n_runs + (self.state.id is None)
            name = self.name if n_runs == 1 else f"{self.name}-{n_runs}"
            run = TrackerRun(self.folder, self.project, name, self.offline, read_config(self.directory))
            self._tracker = self._ask(self.kind, run, self.state.id)
            self.state.id, self.state.n_runs = self._tracker.id, n_runs
            if self.kind.is_logged_again:
                self.state.session = self.state.position.copy()
            self.state.save(self._state_path)
        return self._tracker

    def _logged(self) -> None:
        self.state.position.n_records += 1
        self.n_logged += 1
        if not self.kind.is_buffered:
            self.state.save(self._state_path)

    def _discard(self) -> None:
        """Closes the session after a failure and returns to the saved position: records that were not stored are logged again."""
        is_closed = True
        try:
            if self._tracker is not None:
                self._tracker.close()
        except Exception as error:
            is_closed = False
            print(f"warning: {self.to}: {error}", file=sys.stderr, flush=True)
        self._tracker = None
        saved = State.load(self._state_path)
        if saved.target == self.state.target:
            self.state = saved
        if self.state.session is not None and not is_closed:
            self.state.position = self.state.session
        self._metrics.rewind()
        self._episodes.rewind()

    def _ask(self, function: Any, *args: Any) -> Any:
        """Calls a tracker library and converts all of its exceptions to TrackingError."""
        try:
            return function(*args)
        except TrackingError:
            raise
        except Exception as error:
            message = " ".join(str(error).split()) or type(error).__name__
            kept = "" if self.offline else "; with --offline its records stay on this machine"
            raise TrackingError(f"{self.to}: {message}{kept}") from error
