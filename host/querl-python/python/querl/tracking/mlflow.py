"""MLflow 3. Server: MLFLOW_TRACKING_URI; credentials: MLflow's other environment variables.

Offline, or without MLFLOW_TRACKING_URI, runs are stored in `tracking/mlflow.db` of the run directory. MLflow's older file
store cannot be used: it cannot have both the metrics `val/reward` and `val/reward/win`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from . import SAMPLE_COLUMNS, Sample, Tracker, TrackerRun, TrackingError

#: Limits of one MLflow request.
_MAX_METRICS, _MAX_PARAMS = 1000, 100


class Mlflow(Tracker):
    library = "mlflow"
    environment = ("MLFLOW_TRACKING_URI",)

    def __init__(self, run: TrackerRun, id: str | None) -> None:
        server = None if run.offline else os.environ.get("MLFLOW_TRACKING_URI")
        if not server and importlib.util.find_spec("sqlalchemy") is None:
            remedy = f"`{sys.executable} -m pip install mlflow` installs the whole of it; or name a server with MLFLOW_TRACKING_URI"
            raise TrackingError(f"mlflow-skinny has no database for runs on this machine; {remedy}", code=2)
        folder = run.folder.resolve()
        self._client = MlflowClient(server or f"sqlite:///{folder / 'mlflow.db'}")
        if id is None:
            experiment = self._client.get_experiment_by_name(run.project)
            if experiment is None:
                artifacts = None if server else (folder / "mlflow-artifacts").as_uri()
                experiment_id = self._client.create_experiment(run.project, artifact_location=artifacts)
            else:
                experiment_id = experiment.experiment_id
            id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
            params = [Param(_name(name), str(value)) for name, value in _flat(run.config)]
            for at in range(0, len(params), _MAX_PARAMS):
                self._client.log_batch(id, params=params[at : at + _MAX_PARAMS])
        else:
            self._client.update_run(id, status="RUNNING")
        self.id = id

    def metrics(self, record: int, prefix: str, step: int, values: dict[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [Metric(_name(name), value, now_ms, step) for name, value in values.items()]
        for at in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self.id, metrics=metrics[at : at + _MAX_METRICS])

    def samples(self, record: int, step: int, rows: list[Sample]) -> None:
        # The file format of `mlflow.log_table`, which itself would download and rewrite the file.
        self._client.log_dict(self.id, {"columns": SAMPLE_COLUMNS, "data": rows}, f"samples/step-{step:06}.json")

    def figures(self, record: int, version: int, values: dict[str, float]) -> None:
        self.metrics(record, "", version, values)

    def close(self) -> None:
        self._client.set_terminated(self.id)


def _name(name: str) -> str:
    """Replaces characters that MLflow does not allow in names."""
    return re.sub(r"[^\w\-./: ]", "_", name)


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
