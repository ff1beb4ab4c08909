"""The Python package `querl`: tables, workers, run directories, the program."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import REJECTED_CODE, REJECTED_LABEL, REWARD, Sample

querl = pytest.importorskip("querl")

HITS = {"hits": [{"reranker_score": 0.8}, {"reranker_score": 0.5}]}
EPISODE = {"id": "a", "query": "一天几粒啊", "policy": {"rewrite": "深海鱼油 食用方法", "retrieval": HITS}}
EPISODE["baseline"] = {"rewrite": "鱼油 用量", "retrieval": {"hits": [{"reranker_score": 0.25}]}}


def totals(results: list[Any]) -> list[float]:
    return [result.total for result in results]


@pytest.fixture(scope="module")
def reward() -> Any:
    return querl.Reward(REWARD)


# Tables.


def test_dataclasses_are_rows(reward: Any) -> None:
    @dataclasses.dataclass
    class Side:
        rewrite: str
        retrieval: dict[str, Any]

    @dataclasses.dataclass
    class Record:
        id: str
        query: str
        policy: Side
        baseline: Side
        response: str | None = None

    record = Record("a", EPISODE["query"], Side(**EPISODE["policy"]), Side(**EPISODE["baseline"]))
    assert totals(reward.score([record])) == totals(reward.score([EPISODE]))


def test_pandas_and_arrow_tables_are_rows(reward: Any) -> None:
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    # Arrow structs contain a null for the missing key of the second row.
    judged = {"judgement": {"scored": {"score": 4.0, "reason": ""}}}
    second = {**EPISODE, "id": "b", "policy": {**EPISODE["policy"], **judged}, "baseline": {**EPISODE["baseline"], **judged}}
    expected = totals(reward.score([EPISODE, second]))
    table = pyarrow.Table.from_pylist([EPISODE, second])
    assert totals(reward.score(table)) == expected
    assert totals(reward.score(pandas.DataFrame([EPISODE, second]))) == expected
    assert totals(reward.score(table.to_pandas())) == expected


def test_lines_of_episodes_jsonl_are_rows(reward: Any) -> None:
    assert totals(reward.score([{"format": 3, "episode": EPISODE}])) == totals(reward.score([EPISODE]))
    with pytest.raises(TypeError, match="row 0, field `format`: 2"):
        reward.score([{"format": 2, "episode": EPISODE}])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"policy": {"n_tokens": float("nan")}}, "row 1, field `policy.n_tokens`: nan; expected a finite number"),
        ({"policy": {"retrieval": {"hits": [{"reranker_score": object()}]}}}, r"`policy.retrieval.hits\[0\].reranker_score`: object"),
        ({"gold_ids": ["a", None]}, r"row 1, field `gold_ids\[1\]`: None; expected a text"),
        ({"columns": {1: "a"}}, "row 1, field `columns`: a key that is int"),
    ],
)
def test_a_wrong_value_is_named_with_row_and_field(row: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        querl.rows([EPISODE, row])


@pytest.mark.parametrize("table", [EPISODE, "text", 5])
def test_what_is_no_table_is_refused(table: object) -> None:
    with pytest.raises(TypeError, match="expected a list of dictionaries"):
        querl.rows(table)


def test_a_missing_cell_of_a_dataframe_is_refused_with_a_remedy() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([{"query": "a", "weight": 1.0}, {"query": "b"}])
    with pytest.raises(TypeError, match="row 1, field `weight`: nan.*frame.notna"):
        querl.rows(frame)
    assert querl.rows(frame.astype(object).where(frame.notna(), None))[1] == {"query": "b"}


def test_plain_dictionaries_give_what_rows_give(reward: Any) -> None:
    padded = {**EPISODE, "columns": {"a": None}, "response": None}
    assert totals(reward.score([EPISODE])) == totals(reward.score([padded])) == totals(reward.score(querl.rows([padded])))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named_by_score(reward: Any, scorer: Any, number: float) -> None:
    hits = {"hits": [{"reranker_score": number}]}
    with pytest.raises(TypeError, match=r"row 0, field `policy.retrieval.hits\[0\].reranker_score`"):
        reward.score([{**EPISODE, "policy": {**EPISODE["policy"], "retrieval": hits}}])
    # pandas represents a missing cell as NaN.
    with pytest.raises(TypeError, match="row 0, field `query.baseline`"):
        scorer.score([{"query": {"query": "一天几粒啊", "baseline": number}, "response": "鱼油"}])


def test_a_column_that_is_none_is_refused_as_by_the_server(scorer: Any) -> None:
    from querl.integrations import label_of

    label = {"query": "一天几粒啊", "columns": {"c": None}}
    for requests in ([{"query": label, "response": "鱼油"}], [{"query": json.dumps(label), "response": "鱼油"}]):
        with pytest.raises(TypeError, match=r"row 0, field `query.columns.c`: None|column `c` is null"):
            scorer.score(requests)
    # In a table, and in a row of a dataset, None is a missing cell.
    assert label_of({"querl": label}) == {"query": "一天几粒啊", "columns": {}}


def test_cost_of_an_episode(reward: Any, results: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the cost without a limit, because machines differ."""
    episodes = [result.episode for result in results if isinstance(result, querl.Score)][:64]
    tables = {"dictionaries": episodes, "lines of episodes.jsonl": [{"format": 3, "episode": episode} for episode in episodes]}
    for name, table in tables.items():
        reward.score(table)
        times = []
        for _ in range(200):
            start = time.perf_counter()
            reward.score(table)
            times.append(time.perf_counter() - start)
        with capsys.disabled():
            print(f"\nReward.score of {len(table)} {name}: {sorted(times)[100] / len(table) * 1e6:.1f} us an episode, median of 200 calls", end="")


# Workers.


def score_in_worker(pickled: bytes, requests: list[dict[str, Any]]) -> list[float]:
    return totals(pickle.loads(pickled).score(requests))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_scorer_works_in_a_worker(method: str, scorer: Any, samples: list[Sample], results: list[Any]) -> None:
    pairs = [(sample, result) for sample, result in zip(samples, results, strict=True) if isinstance(result, querl.Score)][:4]
    requests = [sample.request for sample, _ in pairs]
    with multiprocessing.get_context(method).Pool(1) as pool:
        found = pool.apply(score_in_worker, (pickle.dumps(scorer), requests))
    assert found == [result.total for _, result in pairs]


def test_a_pickled_reward_keeps_settings_and_digest(reward: Any) -> None:
    other = querl.Reward(REWARD, settings={"win": 1.0, "loss": -1.0})
    again = pickle.loads(pickle.dumps(other))
    assert (again.name, again.version, again.digest, again.range) == (other.name, other.version, other.digest, other.range)
    assert totals(again.score([EPISODE])) == totals(other.score([EPISODE])) != totals(reward.score([EPISODE]))


def test_another_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="digest"):
        querl.Reward(REWARD, digest="0" * 64)


def test_a_scorer_with_other_plugins_is_refused(run: Path, scorer: Any) -> None:
    digests = scorer.__reduce__()[1][2]
    assert digests and all(len(digest) == 64 for digest in digests)
    with pytest.raises(ValueError, match=f"digests of its plugins are {digests[0]}.*expected {'0' * 64}"):
        querl.Scorer(run, digests=["0" * 64, *digests[1:]])


def test_an_exception_of_a_rejection_is_pickled() -> None:
    error = pickle.loads(pickle.dumps(querl.SampleRejected("deadline", "took 3 s")))
    assert (error.code, error.detail, str(error)) == ("deadline", "took 3 s", "querl rejected the sample: deadline: took 3 s")


def test_score_async_gives_the_same(scorer: Any, samples: list[Sample], results: list[Any]) -> None:
    found = asyncio.run(scorer.score_async([sample.request for sample in samples[:8]]))
    assert [repr(one) for one in found] == [repr(one) for one in results[:8]]


# Results.


def test_a_rejection_is_no_number(scorer: Any) -> None:
    (result,) = scorer.score([{"query": REJECTED_LABEL, "response": "鱼油"}])
    assert isinstance(result, querl.Rejection) and result.code == REJECTED_CODE
    assert not hasattr(result, "total")


def test_an_unknown_query_is_an_error(scorer: Any) -> None:
    with pytest.raises(querl.QuerlError, match="query `nobody`"):
        scorer.score([{"query": "nobody", "response": "鱼油"}])


def test_run_reads_its_files(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "config.resolved.toml", tmp_path)
    read = querl.Run(tmp_path)
    assert (read.episodes(), read.metrics(), read.figures()) == ([], [], [])
    assert read.config["tenant"] == "fivedoctors"
    line = json.dumps({"stage": "rl", "step": 1, "avg_reward": 0.5})
    # A killed process may leave an incomplete last line.
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n\n{line[:20]}", encoding="utf-8")
    assert read.metrics() == [json.loads(line)]
    (tmp_path / "metrics.jsonl").write_text(f"{line[:20]}\n{line}\n", encoding="utf-8")
    with pytest.raises(querl.QuerlError, match="metrics.jsonl:1: not JSON"):
        read.metrics()
    interval = {"mean": 0.5, "low": 0.25, "high": 0.75}
    rl = {"top1": interval, "mrr": None, "components": {"win": interval}, "n_scored": 4, "failures": {"deadline": 1}}
    evaluation = {"n": 4, "systems": {"rl": rl}, "pairs": {"rl-sft": {"top1": {**interval, "n": 4}}}}
    (tmp_path / "eval.json").write_text(json.dumps(evaluation))
    assert [(row["of"], row["metric"], row["mean"]) for row in read.figures()] == [
        ("rl", "top1", 0.5),
        ("rl", "components/win", 0.5),
        ("rl-sft", "top1", 0.5),
    ]


def test_a_moved_run_has_its_own_rows(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    # After the move, rows are read from the new folder, not from the folder in which the run was made.
    (moved / "data" / "train.jsonl").write_bytes(b"")
    assert querl.load_config(moved)["output_dir"] == str(moved)
    trained = json.loads((run / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    with pytest.raises(querl.QuerlError, match="moved"):
        querl.load(moved).score([{"query": trained["metadata"]["id"], "response": "鱼油"}])


def test_run_of_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(querl.QuerlError, match="no run directory"):
        querl.Run(tmp_path)


def test_run_as_tables(run: Path, tmp_path: Path, reward: Any) -> None:
    pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    shutil.copy(run / "config.resolved.toml", tmp_path)
    (tmp_path / "episodes.jsonl").write_text(json.dumps({"format": 3, "step": 1, "episode": EPISODE}) + "\n")
    read, expected = querl.Run(tmp_path), totals(reward.score([EPISODE]))
    for form in (None, "pandas", "arrow"):
        assert totals(reward.score(read.episodes(as_=form))) == expected


# The program.


def test_the_module_runs_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "querl", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("querl ")
    monkeypatch.setenv("QUERL_PROGRAM", str(tmp_path / "missing"))
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1 and "QUERL_PROGRAM" in ended.stderr


def test_console_scripts_are_no_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: if the package contained no program, its console script started itself endlessly."""
    from querl import _program

    monkeypatch.delenv("QUERL_PROGRAM", raising=False)
    monkeypatch.setattr(_program, "__file__", str(tmp_path / "package/_program.py"))
    for folder, content in (("scripts", b"#!/bin/sh\n"), ("programs", b"\x7fELF")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "querl").write_bytes(content)
        (tmp_path / folder / "querl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "scripts"))
    missing = _program.program()
    assert missing == tmp_path / "package/bin/querl"
    with pytest.raises(querl.QuerlError, match="this package was built without it.*cargo build --release.*QUERL_PROGRAM"):
        _program.check(missing)
    monkeypatch.setenv("PATH", f"{tmp_path / 'scripts'}:{tmp_path / 'programs'}")
    assert _program.program() == tmp_path / "programs/querl"
