"""querl.tracking with each tracker's library in offline mode: logged values are read back and compared.

Needs neither the extension module nor the program, only the sources of the package.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trackers
from trackers import N_SAMPLES, Run, Stored, line_of, state, stored, track, tracked

sys.path.insert(0, str(trackers.SOURCES))
installed = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed"))
    for name in trackers.NAMES
]
each_tracker = pytest.mark.parametrize("to", installed)


@pytest.fixture(autouse=True)
def configured() -> None:
    """Overrides the fixture of conftest.py, because these tests use no configuration."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def named(to: str, name: str) -> str:
    return name.replace("#", "_") if to == "mlflow" else name


def expected(to: str, last_sft: int, last_rl: int, seconds: float = 0.25) -> dict[str, dict[int, list[float]]]:
    """The metrics of these steps: every value once under its own name, some also under an alias such as `policy_loss`."""
    metrics: dict[str, dict[int, list[float]]] = {}

    def add(name: str, step: int, value: Any) -> None:
        if value is not None:
            metrics.setdefault(named(to, name), {})[step] = [value]

    for step in range(1, last_sft + 1):
        for name, value in list(line_of("sft", step, seconds).items())[2:]:
            add(f"sft/{name}", step, value)
    for step in range(1, last_rl + 1):
        line = line_of("rl", step, seconds)
        for name, value in list(line.items())[2:]:
            add(name, step, value)
        add("policy_loss", step, line["actor/pg_loss"])
        add("value_loss", step, line["critic/vf_loss"])
        add("api_calls", step, 3.0 * step)
        add("rag_api_calls", step, 3.0 * step)
        add("cache_hit_rate", step, step / (4 * step))
        if step % 2 == 0:
            add("val/reward", step, step / 7)
    return metrics


def metrics_of(found: Stored) -> dict[str, dict[int, list[float]]]:
    return {name: dict(values) for name, values in found.metrics.items() if any(values.values())}


@each_tracker
def test_values_read_back_are_equal(to: str, run: Run) -> None:
    run.finished()
    first = tracked(run, to)
    assert first.startswith(f"{to}: 16 new records; run "), first
    found = stored(run, to)
    assert metrics_of(found) == expected(to, 5, 5)
    bounds = {"": 0.7, "/low": 0.7 - 0.1, "/high": 0.7 + 0.1}
    assert found.figures == {f"eval/{of}/top1{bound}": value for of in ("rl", "rl-sft") for bound, value in bounds.items()}
    assert sorted(found.samples) == [0, 2, 4]
    text = found.samples[2]
    assert all(part in text for part in ("改写 2", "问 0", "老师", "deadline", repr(2 / 3))), text
    assert f"问 {N_SAMPLES}" not in text
    assert tracked(run, to).startswith(f"{to}: nothing new; run {state(run, to)['id']} ")


@each_tracker
def test_a_restart_continues_the_same_run_without_gaps_or_doubles(to: str, run: Run) -> None:
    run.lines("sft", 1, 3)
    tracked(run, to)
    id = state(run, to)["id"]
    # Stopped and resumed from the checkpoint of step 2; only the times differ.
    run.rewind("sft", 2)
    tracked(run, to)
    run.lines("sft", 3, 4, seconds=9.0)
    with (run.directory / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "sft", "st')
    tracked(run, to)
    run.rewind_torn()
    run.lines("sft", 5, 5)
    run.finish("sft")
    run.begin("rl", run.best("sft"))
    run.episodes(0)
    run.lines("rl", 1, 2)
    tracked(run, to)
    run.lines("rl", 3, 3)
    tracked(run, to)
    found, wanted = metrics_of(stored(run, to)), expected(to, 5, 3)
    wanted["sft/timing_s/step"][4] = [9.0]
    assert state(run, to)["id"] == id
    assert found == wanted


@each_tracker
def test_a_killed_process_leaves_no_gap_and_no_double(to: str, run: Run) -> None:
    run.lines("sft", 1, 20)
    with in_use(run):
        process = track(run, to, "--offline", "--follow")
        wait_for(lambda: n_records(run, to) >= 20, process)
        run.lines("sft", 21, 22)
        wait_for(lambda: n_records(run, to) >= 22, process)
        process.kill()
        process.communicate()
    # The background process of the library may still write.
    time.sleep(2)
    run.lines("sft", 23, 24)
    tracked(run, to)
    assert metrics_of(stored(run, to)) == expected(to, 24, 0)


@each_tracker
def test_a_training_on_other_inputs_is_another_run(to: str, run: Run) -> None:
    run.finished()
    tracked(run, to)
    first = state(run, to)["id"]
    run.begin("rl", {**run.best("sft"), "rl.kl_coef": "0.5"})
    run.episodes(0)
    run.lines("rl", 1, 2)
    tracked(run, to)
    second = stored(run, to)
    assert state(run, to)["id"] != first and state(run, to)["n_runs"] == 2
    # The evaluation belongs to the previous training.
    assert metrics_of(second) == expected(to, 5, 2) and second.figures == {} and sorted(second.samples) == [0]
    # While sft is trained again, the lines of rl belong to the previous training.
    run.begin("sft", {"seed": "43"})
    run.lines("sft", 1, 2)
    tracked(run, to)
    assert metrics_of(stored(run, to)) == expected(to, 2, 0) and state(run, to)["n_runs"] == 3
    run.finish("sft")
    run.begin("rl", run.best("sft"))
    run.lines("rl", 1, 1)
    tracked(run, to)
    assert metrics_of(stored(run, to)) == expected(to, 2, 1) and state(run, to)["n_runs"] == 3


@each_tracker
def test_follow_ends_with_the_run(to: str, run: Run) -> None:
    with in_use(run):
        process = track(run, to, "--offline", "--follow")
        run.lines("sft", 1, 2)
        wait_for(lambda: n_records(run, to) >= 2, process)
        second = track(run, to, "--offline")
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 1 and "another process mirrors this run" in errors, errors
        run.lines("sft", 3, 4)
        assert process.poll() is None
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert out.startswith(f"{to}: 4 new records; ") and metrics_of(stored(run, to)) == expected(to, 4, 0)


@pytest.mark.parametrize("to", installed[:1])
def test_a_signal_ends_the_mirroring_with_everything_stored(to: str, run: Run) -> None:
    run.lines("sft", 1, 3)
    with in_use(run):
        process = track(run, to, "--offline", "--follow")
        wait_for(lambda: n_records(run, to) >= 3, process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 130 and metrics_of(stored(run, to)) == expected(to, 3, 0)


@pytest.mark.parametrize("to", installed[1:2])
def test_a_tracker_without_network_is_one_sentence_and_is_continued_later(to: str, run: Run) -> None:
    run.lines("sft", 1, 2)
    process = track(run, to, MLFLOW_TRACKING_URI="http://127.0.0.1:9", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    _, errors = process.communicate(timeout=120)
    last = errors.splitlines()[-1]
    assert (
        process.returncode == 1 and last.startswith("error: mlflow: ") and last.endswith("with --offline its records stay on this machine")
    ), errors
    tracked(run, to)
    assert metrics_of(stored(run, to)) == expected(to, 2, 0)


def test_a_missing_library_is_one_sentence_with_the_command(run: Run, tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("raise ModuleNotFoundError('no wandb', name='wandb')")
    process = track(run, "wandb", PYTHONPATH=os.pathsep.join([str(tmp_path), str(trackers.SOURCES)]))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and errors.count("\n") == 1, errors
    assert errors.startswith(f"error: {sys.executable} does not have the library wandb; `{sys.executable} -m pip install wandb`"), errors


def test_mlflow_skinny_without_a_server_is_one_sentence_with_the_command(run: Run, tmp_path: Path) -> None:
    """Symptom: the last line was MLflow's error, `unsupported URI 'sqlite:...'`."""
    run.lines("sft", 1, 2)
    (tmp_path / "mlflow").mkdir()
    # `mlflow-skinny` does not require sqlalchemy.
    (tmp_path / "mlflow/__init__.py").write_text("import sys\nsys.modules['sqlalchemy'] = None\nMlflowClient = None\n")
    (tmp_path / "mlflow/entities.py").write_text("Metric = Param = None\n")
    process = track(run, "mlflow", "--offline", PYTHONPATH=os.pathsep.join([str(tmp_path), str(trackers.SOURCES)]))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and errors.startswith("error: mlflow-skinny has no database"), errors
    assert errors.count("\n") == 1 and "-m pip install mlflow`" in errors, errors


def test_a_damaged_state_is_named_with_the_remedy(run: Run) -> None:
    if not (to := next((name for name in trackers.NAMES if importlib.util.find_spec(name)), "")):
        pytest.skip("no tracker is installed")
    tracking = run.directory / "tracking"
    tracking.mkdir()
    for text in ("{", '{"format": 9}', '{"format": 1, "session": null}'):
        (tracking / f"{to}.json").write_text(text)
        process = track(run, to, "--offline")
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2 and f"tracking/{to}.json: cannot be read: " in errors and "remove it" in errors, errors


def test_names_of_the_source_plan_are_next_to_ours() -> None:
    from querl.tracking import values_of

    calls = {
        "calls/retrieval/calls": 6,
        "calls/retrieval/cached": 2,
        "calls/judge m/calls": 2,
        "calls/judge m/cached": 0,
        "calls/judge m/joined": 2,
    }
    prefix, values = values_of(
        {"stage": "rl", "step": 3, "actor/pg_loss": -0.5, "critic/vf_loss": None, "actor/pg_clipfrac": 0.25, **calls}
    )
    added = {"policy_loss": -0.5, "clip_fraction": 0.25, "api_calls": 8.0, "rag_api_calls": 6.0, "cache_hit_rate": 2 / 12}
    assert prefix == "" and values == {"actor/pg_loss": -0.5, "actor/pg_clipfrac": 0.25, **calls, **added}
    assert values_of({"stage": "rewrite", "step": 0, "calls/teacher m/calls": 4}) == (
        "rewrite/",
        {"rewrite/calls/teacher m/calls": 4.0, "rewrite/api_calls": 4.0, "rewrite/cache_hit_rate": 0.0},
    )


def test_a_file_is_read_on_and_from_its_start_where_it_was_replaced(tmp_path: Path) -> None:
    from querl.tracking._files import GrowingLines

    path = tmp_path / "metrics.jsonl"
    lines = GrowingLines(path)
    assert lines.read() == (True, [])
    path.write_bytes(b"a\nb\nc")
    assert lines.read() == (True, [b"a\n", b"b\n"])
    path.write_bytes(b"a\nb\nc\nd\n")
    assert lines.read() == (False, [b"c\n", b"d\n"])
    # As many bytes as before, but other lines.
    path.write_bytes(b"a\nb\nC\nD\n")
    assert lines.read() == (True, [b"a\n", b"b\n", b"C\n", b"D\n"])
    path.write_bytes(b"a\n")
    assert lines.read() == (True, [b"a\n"])
    assert lines.read() == (False, [])


class in_use:
    """Holds the lock of a run directory, as a querl process does."""

    def __init__(self, run: Run) -> None:
        self.file = (run.directory / ".in-use").open("w")

    def __enter__(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.file.close()


def n_records(run: Run, to: str) -> int:
    try:
        return int(state(run, to)["position"]["n_records"])
    except FileNotFoundError:
        return 0


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    started = time.monotonic()
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - started < 120
        time.sleep(0.05)
