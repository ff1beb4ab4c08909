"""Weights & Biases (wandb 0.31). Key: WANDB_API_KEY, or `wandb login`.

W&B steps must increase, so the W&B step is the number of the record, and charts use the step of the stage as x axis. A
killed process may lose the last records of its session. The next start logs that session again; the server ignores
records whose step it already has. Offline, each start writes a new folder `offline-run-*` with the same id; upload them
with `wandb sync`, one after another.
"""

from __future__ import annotations

import uuid
from typing import Any

import wandb

from . import SAMPLE_COLUMNS, Sample, Tracker, TrackerRun


class Wandb(Tracker):
    library = "wandb"
    environment = ("WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE")
    is_logged_again = True

    def __init__(self, run: TrackerRun, id: str | None) -> None:
        self.id = id or uuid.uuid4().hex[:8]
        settings = wandb.Settings(console="off", x_disable_stats=True, disable_git=True, save_code=False)
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=self.id,
            resume="allow",
            mode="offline" if run.offline else None,
            dir=run.folder,
            config=run.config,
            settings=settings,
        )
        self._defined: set[str] = set()

    def metrics(self, record: int, prefix: str, step: int, values: dict[str, float]) -> None:
        self._log(record, f"{prefix}step", step, values)

    def samples(self, record: int, step: int, rows: list[Sample]) -> None:
        table = wandb.Table(columns=list(SAMPLE_COLUMNS), data=[list(row) for row in rows])
        self._log(record, "step", step, {"samples": table})

    def figures(self, record: int, version: int, values: dict[str, float]) -> None:
        self._run.summary.update(values)

    def close(self) -> None:
        self._run.finish()

    def _log(self, record: int, axis: str, step: int, values: dict[str, Any]) -> None:
        for name in values.keys() - self._defined:
            self._run.define_metric(name, step_metric=axis)
        self._defined |= values.keys()
        self._run.log({**values, axis: step}, step=record)
