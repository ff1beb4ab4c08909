"""The files of a run directory that tracking reads, and its own state file. docs/files.md describes the files."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # not on Unix: every run counts as finished, and there are no locks
    fcntl = None  # type: ignore[assignment]


class GrowingLines:
    """Reads the new complete lines of a file that another process appends to, truncates and replaces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rewind()

    def rewind(self) -> None:
        """Makes the next `read` start at the first line."""
        self._offset = 0
        #: The last line that was read. If the file has other bytes at this offset, it was truncated or replaced.
        self._last = b""

    def read(self) -> tuple[bool, list[bytes]]:
        """Returns whether the lines start at the beginning of the file, and the new lines. An incomplete last line is not read yet."""
        try:
            with self.path.open("rb") as file:
                if self._offset and not self._is_same(file):
                    self.rewind()
                is_first = self._offset == 0
                file.seek(self._offset)
                lines = []
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    lines.append(line)
                    self._offset += len(line)
                    self._last = line
                return is_first, lines
        except FileNotFoundError:
            self.rewind()
            return True, []

    def _is_same(self, file: IO[bytes]) -> bool:
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last


@dataclass
class Position:
    """The records of a run that a tracker has."""

    #: Number of records: lines of metrics, tables of samples, evaluations.
    n_records: int = 0
    #: Number of logged lines of each training stage.
    n_lines: dict[str, int] = field(default_factory=dict)
    #: Digest of the logged line of each other stage, to notice that a new run of the stage replaced it.
    lines: dict[str, str] = field(default_factory=dict)
    #: Step of the last validation whose samples were logged.
    sample_step: int = -1
    #: Digest of the logged `eval.json`.
    figures: str = ""
    n_figures: int = 0

    def copy(self) -> Position:
        return Position(**json.loads(json.dumps(asdict(self))))


_FORMAT = 1


@dataclass
class State:
    """`tracking/TRACKER.json`: the tracker run that mirrors this run, and the position reached."""

    #: Digest of project, name and the tracker's storage location. A change starts a new tracker run.
    target: str = ""
    #: Id of the tracker run; None before it exists.
    id: str | None = None
    #: Number of tracker runs so far. Training on other inputs starts a new one.
    n_runs: int = 0
    #: Digest of the inputs of each training stage.
    inputs: dict[str, str] = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    #: The position at which the open session began, for trackers that may lose records if the process is killed.
    session: Position | None = None

    @classmethod
    def load(cls, path: Path) -> State:
        """Loads the file; a missing file gives a new state.

        Raises ValueError for another format.
        """
        try:
            record = json.loads(path.read_bytes())
        except FileNotFoundError:
            return cls()
        if record.pop("format", None) != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT}")
        session = record.pop("session")
        state = cls(**{**record, "position": Position(**record["position"])})
        state.session = None if session is None else Position(**session)
        return state

    def save(self, path: Path) -> None:
        """Replaces the file atomically."""
        written = path.with_name(f".{path.name}.new")
        written.write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n")
        os.replace(written, path)


class FolderLock:
    """File lock that prevents two processes from mirroring the same run to the same tracker."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def take(self) -> bool:
        """Tries to acquire the lock. Returns False if another process holds it."""
        if fcntl is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        self._file.close()


def is_in_use(directory: Path) -> bool:
    """True if a querl process holds the lock of the run directory."""
    if fcntl is None:
        return False
    try:
        with (directory / ".in-use").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


@dataclass(frozen=True)
class Ledger:
    """The entries of `stages.json` by stage; empty if the file does not exist."""

    stages: dict[str, Any]

    @classmethod
    def read(cls, directory: Path) -> Ledger:
        try:
            return cls(json.loads((directory / "stages.json").read_bytes()).get("stages", {}))
        except FileNotFoundError:
            return cls({})

    def inputs(self, stage: str) -> str:
        """Digest of the inputs with which a stage was started."""
        return digest_of(self.stages.get(stage, {}).get("inputs"))

    def is_finished(self, stage: str) -> bool:
        return stage not in self.stages or bool(self.stages[stage].get("finished"))

    def is_current(self, stage: str) -> bool:
        """False if the stage used a model of `sft` or `rl` that is being trained again or was trained again since."""
        inputs = self.stages.get(stage, {}).get("inputs", {})
        for other in ("sft", "rl"):
            used, outputs = inputs.get(f"best of {other}"), self.stages.get(other, {}).get("outputs", {})
            folder = f"{other}/best/"
            # As `Outputs::digest` of querl-pipeline: only files directly in the folder.
            files = sorted(f"{name.removeprefix(folder)} {file['sha256']}" for name, file in outputs.items() if _is_in(name, folder))
            if used is not None and not self.is_finished(other):
                return False
            if used is not None and files and hashlib.sha256("\n".join(files).encode()).hexdigest() != used:
                return False
        return True


def _is_in(name: str, folder: str) -> bool:
    return name.startswith(folder) and "/" not in name.removeprefix(folder)


def digest_of(value: Any) -> str:
    """First 64 bits of the SHA-256 of bytes, or of a value's JSON, in hexadecimal. For change detection only."""
    content = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def read_config(directory: Path) -> dict[str, Any]:
    """The resolved configuration without `[tracking]`; empty before the first stage, and on Python 3.10, which has no `tomllib`."""
    if sys.version_info >= (3, 11):
        import tomllib

        try:
            config: dict[str, Any] = tomllib.loads((directory / "config.resolved.toml").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        config.pop("tracking", None)
        return config
    return {}
