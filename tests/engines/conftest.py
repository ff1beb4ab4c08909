"""Fixtures: a run of the example with finished data stages, and samples of its queries.

Needs target/release/querl (or QUERL) and the package `querl`: setup.sh. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUERL = os.environ.get("QUERL", str(ROOT / "target/release/querl"))
REWARD = ROOT / "plugins/reward-competition"
# Before `querl` is imported: a development installation of the package does not contain the program.
os.environ.setdefault("QUERL_PROGRAM", QUERL)
os.environ.setdefault("QUERL_CACHE_DIR", str(ROOT / "target/engines-cache"))
# Before `ray` is imported: without token and usage statistics, and with a long start timeout for busy machines.
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "300"}
os.environ.update(RAY)

# If the package is not installed: the sources, with the extension module copied next to them. Also for child processes of the tests.
SOURCES = ROOT / "host/querl-python/python"
if importlib.util.find_spec("querl") is None and any((SOURCES / "querl").glob("_querl*.so")):
    sys.path.insert(0, str(SOURCES))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))

STEP, N_QUERIES, N_SAMPLES = 3, 125, 4


@dataclass(frozen=True)
class Sample:
    """A response to a query of the run."""

    id: str
    prompt: list[dict[str, str]]
    response: str
    index: int

    @property
    def tokens(self) -> list[int]:
        """As many token ids as characters; 0 is end-of-sequence."""
        return [*range(1, len(self.response) + 1), 0]

    @property
    def request(self) -> dict[str, Any]:
        return {"query": self.id, "response": self.response, "step": STEP, "sample_index": self.index, "n_tokens": len(self.tokens)}


def querl_program(*args: str, cwd: Path) -> str:
    """Runs the program; returns its stdout."""
    ended = subprocess.run([QUERL, *args], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the stages up to `convert`. Every episode is judged, because sampling depends on ids, which differ by engine."""
    if not Path(QUERL).is_file():
        pytest.skip(f"{QUERL} is not built")
    folder = tmp_path_factory.mktemp("project")
    config = (ROOT / "host/querl/tests/support/querl.toml").read_text()
    config = config.replace("max_length = 4096\n", "").replace("sample_rate = 0.5", "sample_rate = 1.0")
    for name, path in {"example": "examples/fivedoctors", "plugins": "plugins", "model": "examples/tiny-qwen3"}.items():
        config = config.replace("{" + name + "}", str(ROOT / path))
    rows = (ROOT / "examples/fivedoctors/teacher_rewrites.jsonl").read_text(encoding="utf-8")
    for name in ("queries.jsonl", "teacher.jsonl"):
        (folder / name).write_text(rows, encoding="utf-8")
    (folder / "querl.toml").write_text(config, encoding="utf-8")
    querl_program("run", "querl.toml", "--to", "convert", cwd=folder)
    return folder / "run"


@pytest.fixture(scope="session")
def samples(run: Path) -> list[Sample]:
    """500 samples in groups of four: the teacher's rewrite, the rewrite of another query, the query, and the query reversed."""
    paths = [run / "data" / f"{split}.jsonl" for split in ("train", "val", "test")]
    rows = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()][:N_QUERIES]
    assert len(rows) == N_QUERIES
    queries = [row["metadata"]["original_query"] for row in rows]
    rewrites = [row["messages"][-1]["content"] for row in rows if row["messages"][-1]["role"] == "assistant"]
    samples = []
    for position, row in enumerate(rows):
        prompt = [message for message in row["messages"] if message["role"] != "assistant"]
        own = rewrites[position % len(rewrites)]
        responses = [own, rewrites[(7 * position + 3) % len(rewrites)], queries[position], queries[position][::-1]]
        samples += [Sample(row["metadata"]["id"], prompt, response, index) for index, response in enumerate(responses)]
    return samples


@pytest.fixture(scope="session")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of `querl export verl` for two machines with one GPU each."""
    folder = tmp_path_factory.mktemp("exported") / "verl"
    querl_program("export", "verl", str(run), "--out", str(folder), "--nodes", "2", "--gpus", "1", cwd=run.parent)
    return folder


@pytest.fixture(scope="session")
def scorer(run: Path) -> Any:
    querl = pytest.importorskip("querl")
    return querl.load(run)


@pytest.fixture(scope="session")
def results(scorer: Any, samples: list[Sample]) -> list[Any]:
    """Results of `Scorer.score` in one call."""
    found = scorer.score([sample.request for sample in samples])
    assert sum(result.__class__.__name__ == "Score" for result in found) >= len(samples) // 2
    return list(found)


@pytest.fixture(autouse=True)
def configured(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the environment so that the integrations find the run."""
    monkeypatch.setenv("QUERL_CONFIG", str(run))


#: A query without the teacher's rewrite, which `reward-competition` requires.
REJECTED_LABEL = json.dumps({"query": "一天几粒啊"}, ensure_ascii=False)
REJECTED_CODE = "baseline_missing"
