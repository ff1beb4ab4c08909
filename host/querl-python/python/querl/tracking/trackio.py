"""Trackio 0.43. Local by default (TRACKIO_DIR); TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name a Space or a server.

Trackio identifies runs by name, so the name gets a random suffix. It sends records in a background thread, and a killed
process loses unsent ones. Therefore each batch has its own session, which is closed after the batch.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

import trackio

from . import SAMPLE_COLUMNS, Sample, Tracker, TrackerRun


class Trackio(Tracker):
    library = "trackio"
    environment = ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
    is_buffered = True

    def __init__(self, run: TrackerRun, id: str | None) -> None:
        self.id = id or f"{run.name}-{uuid.uuid4().hex[:6]}"
        self._project = run.project
        #: Passed with the first session of a new run only.
        self._config = run.config if id is None else None
        self._session: Any = None
        if run.offline:
            for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(variable, None)

    def metrics(self, record: int, prefix: str, step: int, values: dict[str, float]) -> None:
        self._open().log(values, step=step)

    def samples(self, record: int, step: int, rows: list[Sample]) -> None:
        table = trackio.Table(columns=list(SAMPLE_COLUMNS), data=[list(row) for row in rows])
        self._open().log({"samples": table}, step=step)

    def figures(self, record: int, version: int, values: dict[str, float]) -> None:
        self._open().log(values, step=version)

    def flush(self) -> None:
        if self._session is not None:
            library: Any = trackio
            library.finish()
            self._session = None

    def close(self) -> None:
        self.flush()

    def _open(self) -> Any:
        if self._session is None:
            self._session = trackio.init(
                project=self._project,
                name=self.id,
                resume="allow",
                config=self._config,
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
            self._config = None
        return self._session
