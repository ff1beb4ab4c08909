"""SwanLab 0.10. Key: SWANLAB_API_KEY, or `swanlab login`.

Offline, each start writes a new folder `run-*-ID` in `tracking/swanlab` of the run directory; `swanlab sync` uploads all of
them to the same experiment. SwanLab buffers its file, so a killed process loses the last records of its session. The
next start logs that session again; SwanLab ignores steps that the experiment already has.
"""

from __future__ import annotations

import uuid
from typing import Any

import swanlab

from . import Sample, Tracker, TrackerRun


class Swanlab(Tracker):
    library = "swanlab"
    environment = ("SWANLAB_API_HOST", "SWANLAB_WORKSPACE", "SWANLAB_MODE")
    is_logged_again = True

    def __init__(self, run: TrackerRun, id: str | None) -> None:
        self.id = id or uuid.uuid4().hex[:16]
        # Disables monitoring of this process and its packages.
        probe = {"monitor": False, "requirements": False, "git": False, "runtime": False}
        mode: Any = "offline" if run.offline else None
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=self.id,
            resume="allow",
            mode=mode,
            log_dir=str(run.folder / "swanlab"),
            config=run.config,
            settings=swanlab.Settings.model_validate({"interactive": False, "probe": probe}),
        )

    def metrics(self, record: int, prefix: str, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def samples(self, record: int, step: int, rows: list[Sample]) -> None:
        texts = [
            swanlab.Text(f"{rewrite}\nteacher: {teacher}\nscore: {code or score}\ntop1: {top1}", caption=query)
            for _, query, rewrite, teacher, score, code, top1 in rows
        ]
        self._run.log({"samples": texts}, step=step)

    def figures(self, record: int, version: int, values: dict[str, float]) -> None:
        self._run.log(values, step=version)

    def close(self) -> None:
        self._run.finish()
