"""Reads back the files of each tracker's offline mode, and writes a run directory to mirror."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[2] / "host/querl-python/python"
NAMES = ("wandb", "mlflow", "swanlab", "trackio")
N_SAMPLES = 2


class Run:
    """A run directory that grows as during training. Its numbers need all digits of a double."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        (directory / "config.resolved.toml").write_text('tenant = "t"\nseed = 42\n[rl]\nkl_coef = 0.05\n[tracking]\nto = "none"\n')
        self.stages: dict[str, Any] = {}
        self.begin("sft", {"seed": "42"})

    def begin(self, stage: str, inputs: dict[str, str]) -> None:
        """Restarts a stage as the runner does: removes its lines, then writes an unfinished entry to the ledger."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        path.with_suffix(".new").write_text("".join(line for line in lines if json.loads(line)["stage"] != stage))
        path.with_suffix(".new").replace(path)
        if stage == "rl":
            (self.directory / "episodes.jsonl").write_text("")
        self._put(stage, {"inputs": inputs, "finished": False})

    def finish(self, stage: str) -> None:
        digest = hashlib.sha256(repr(self.stages[stage]).encode()).hexdigest()
        outputs = {} if stage == "eval" else {f"{stage}/best/adapter.safetensors": {"bytes": 1, "sha256": digest}}
        self._put(stage, {**self.stages[stage], "finished": True, "outputs": outputs})

    def best(self, stage: str) -> dict[str, str]:
        """The entry of the model of `stage` among the inputs of a later stage."""
        ((name, file),) = self.stages[stage]["outputs"].items()
        return {f"best of {stage}": hashlib.sha256(f"{name.split('/')[-1]} {file['sha256']}".encode()).hexdigest()}

    def _put(self, stage: str, entry: dict[str, Any]) -> None:
        self.stages[stage] = entry
        text = json.dumps({"format": 2, "stages": self.stages})
        (self.directory / "stages.new").write_text(text)
        (self.directory / "stages.new").replace(self.directory / "stages.json")

    def lines(self, stage: str, first: int, last: int, *, seconds: float = 0.25) -> None:
        with (self.directory / "metrics.jsonl").open("a") as file:
            for step in range(first, last + 1):
                file.write(json.dumps(line_of(stage, step, seconds)) + "\n")
                if stage == "rl" and step % 2 == 0:
                    file.write(json.dumps({"stage": "rl", "step": step, "val/reward": step / 7, "val/reward/win": None}) + "\n")

    def rewind(self, stage: str, step: int) -> None:
        """Truncates the log to the checkpoint of a step, as a resumed training does."""
        path = self.directory / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [line for line in lines if line["stage"] != stage or line["step"] <= step]
        path.with_suffix(".new").write_text("".join(json.dumps(line) + "\n" for line in kept))
        path.with_suffix(".new").replace(path)

    def rewind_torn(self) -> None:
        """Removes an incomplete last line, as the start of a run does after a kill."""
        path = self.directory / "metrics.jsonl"
        path.write_text(path.read_text().rpartition("\n")[0] + "\n")

    def episodes(self, step: int) -> None:
        with (self.directory / "episodes.jsonl").open("a") as file:
            for split, number in [("train", 0), *(("validation", number) for number in range(N_SAMPLES + 1))]:
                policy = {"rewrite": f"改写 {step}", "retrieval": {"hits": [{"reranker_score": 0.1 + number}]}}
                episode = {
                    "id": f"{step}/{number}",
                    "split": split,
                    "query": f"问 {number}",
                    "policy": policy,
                    "baseline": {"rewrite": "老师"},
                }
                scored, rejected = {"scored": {"total": step / 3}}, {"rejected": {"code": "deadline", "detail": "", "by": "host"}}
                record = {"format": 3, "step": step, "episode": episode, "outcome": rejected if number == 1 else scored}
                file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")

    def evaluation(self, top1: float) -> None:
        figure = {"mean": top1, "low": top1 - 0.1, "high": top1 + 0.1}
        evaluation = {
            "n": 4,
            "systems": {"rl": {"top1": figure, "mrr": None, "n_scored": 4}},
            "pairs": {"rl-sft": {"top1": {**figure, "n": 4}}},
        }
        (self.directory / "eval.json").write_text(json.dumps(evaluation))

    def finished(self) -> Run:
        self.lines("sft", 1, 5)
        self.finish("sft")
        self.begin("rl", self.best("sft"))
        for step in (0, 2, 4):
            self.episodes(step)
        self.lines("rl", 1, 5)
        self.finish("rl")
        self.begin("eval", {**self.best("sft"), **self.best("rl")})
        self.evaluation(0.7)
        self.finish("eval")
        return self


def line_of(stage: str, step: int, seconds: float) -> dict[str, Any]:
    if stage == "sft":
        return {"stage": "sft", "step": step, "loss": 1 / (step + 2), "timing_s/step": seconds}
    calls = {"calls/retrieval/calls": 3.0 * step, "calls/retrieval/cached": float(step), "calls/retrieval/joined": 0.0}
    update = {"actor/pg_loss": -step / 3, "critic/vf_loss": step / 9, "plugin/reward#2/fuel": 1e15 + step}
    return {
        "stage": "rl",
        "step": step,
        "avg_reward": step / 7,
        "win_rate": 0.5,
        "avg_top1": None,
        **calls,
        **update,
        "timing_s/step": seconds,
    }


@dataclass
class Stored:
    """The content of one run in a tracker."""

    #: Values of each metric by step, in the order in which they were logged.
    metrics: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    figures: dict[str, float] = field(default_factory=dict)
    #: Rows of the samples by step, as text.
    samples: dict[int, str] = field(default_factory=dict)

    def add(self, name: str, step: int, value: float) -> None:
        if name.startswith("eval/"):
            self.figures[name] = value
        else:
            self.metrics[name][step].append(value)


def track(run: Run, to: str, *args: str, **environment: str) -> subprocess.Popen[str]:
    """Starts `python -m querl.track` offline."""
    command = [
        sys.executable,
        "-m",
        "querl.track",
        str(run.directory),
        "--to",
        to,
        "--project",
        "tests",
        "--samples",
        str(N_SAMPLES),
        *args,
    ]
    base = {
        **os.environ,
        "PYTHONPATH": str(SOURCES),
        "TRACKIO_DIR": str(run.directory.parent / "trackio"),
        "HOME": str(run.directory.parent),
    }
    return subprocess.Popen(
        command, env={**base, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )


def tracked(run: Run, to: str, *args: str) -> str:
    """Mirrors the run offline; returns stdout."""
    process = track(run, to, "--offline", *args)
    out, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    return out


def state(run: Run, to: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run.directory / "tracking" / f"{to}.json").read_text())
    return record


def stored(run: Run, to: str) -> Stored:
    """The tracker's content for the current run."""
    readers = {"wandb": _wandb, "mlflow": _mlflow, "swanlab": _swanlab, "trackio": _trackio}
    result = Stored()
    readers[to](run.directory / "tracking", state(run, to)["id"], result)
    return result


def _wandb(folder: Path, id: str, result: Stored) -> None:
    """Applies the rule of the W&B server: a record whose step is not larger than the previous ones is dropped."""
    from wandb.proto.wandb_internal_pb2 import Record

    last = -1
    for directory in sorted((folder / "wandb").glob(f"offline-run-*-{id}")):
        for content in _log_records(directory / f"run-{id}.wandb"):
            record = Record.FromString(content)
            if record.HasField("history") and record.history.step.num > last:
                last = record.history.step.num
                items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                axis = next(name for name in ("step", "sft/step") if name in items)
                for name, value in items.items():
                    if name == "samples/path":
                        table = json.loads((directory / "files" / value).read_text())
                        result.samples[items[axis]] = json.dumps(table, ensure_ascii=False)
                    elif not name.startswith(("samples/", "_")) and name != axis:
                        result.add(name, items[axis], value)
            for item in record.summary.update if record.HasField("summary") else ():
                name = item.key or "/".join(item.nested_key)
                if name.startswith("eval/"):
                    result.figures[name] = json.loads(item.value_json)


def _swanlab(folder: Path, id: str, result: Stored) -> None:
    """Applies the rule of the SwanLab server: a value for a step that the metric already has is dropped."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    for directory in sorted((folder / "swanlab").glob(f"run-*-{id}")):
        for content in _log_records(directory / f"run-{id}.swanlab"):
            record = Record.FromString(content)
            if record.HasField("scalar"):
                scalar = record.scalar
                if scalar.key.startswith("eval/") or not result.metrics[scalar.key][scalar.step]:
                    result.add(scalar.key, scalar.step, scalar.value.number)
            if record.HasField("media"):
                texts = [(directory / "media/text" / item.filename).read_text() + item.caption for item in record.media.value.items]
                result.samples[record.media.step] = "\n".join(texts)


def _log_records(path: Path) -> Iterator[bytes]:
    """Records in LevelDB's log format after a header of 7 bytes, which both libraries write. An incomplete record ends the log."""
    content, at, block, parts = path.read_bytes(), 7, 32768, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + length > len(content):
            return
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def _mlflow(folder: Path, id: str, result: Stored) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.resolve() / 'mlflow.db'}")
    for name in client.get_run(id).data.metrics:
        for metric in client.get_metric_history(id, name):
            result.add(name, metric.step, metric.value)
    for file in (folder / "mlflow-artifacts" / id / "artifacts/samples").glob("step-*.json"):
        result.samples[int(file.stem.removeprefix("step-"))] = json.dumps(json.loads(file.read_text()), ensure_ascii=False)


def _trackio(folder: Path, id: str, result: Stored) -> None:
    program = "import json, sys, trackio.sqlite_storage as s; print(json.dumps(s.SQLiteStorage.get_logs(*sys.argv[1:]), default=str))"
    environment = {**os.environ, "TRACKIO_DIR": str(folder.parent.parent / "trackio")}
    read = subprocess.run([sys.executable, "-c", program, "tests", id], env=environment, capture_output=True, text=True, check=True)
    for row in json.loads(read.stdout.splitlines()[-1]):
        for name, value in row.items():
            if name == "samples":
                result.samples[row["step"]] = json.dumps(value, ensure_ascii=False)
            elif name not in ("step", "timestamp"):
                result.add(name, row["step"], value)
