"""500 responses have bit-identical totals through every integration, through the reward plugin alone and through `querl plugin replay`."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import adapters
import pytest
from conftest import REWARD, STEP, Sample, querl_program

querl = pytest.importorskip("querl")


def bits(totals: Iterable[float | None]) -> list[str | None]:
    return [None if total is None else float(total).hex() for total in totals]


def totals_of(results: list[Any]) -> list[float | None]:
    return [result.total if isinstance(result, querl.Score) else None for result in results]


@pytest.mark.parametrize("name", adapters.EXACT)
def test_integration_gives_the_totals_of_the_scorer(name: str, samples: list[Sample], results: list[Any]) -> None:
    expected = totals_of(results)
    if name.startswith("swift"):
        # In ms-swift a rejected sample gets the mean of its group: test_swift.py.
        pairs = zip(expected, adapters.EXACT[name](samples), strict=True)
        expected, found = map(list, zip(*[pair for pair in pairs if pair[0] is not None], strict=True))
    else:
        found = adapters.EXACT[name](samples)
    assert bits(found) == bits(expected)


def test_openrlhf_gives_the_totals_in_single_precision(samples: list[Sample], results: list[Any]) -> None:
    single = [None if total is None else struct.unpack("f", struct.pack("f", total))[0] for total in totals_of(results)]
    assert bits(adapters.openrlhf(samples)) == bits(single)


def test_scoring_again_gives_the_same_bits(scorer: Any, samples: list[Sample], results: list[Any]) -> None:
    again = scorer.score([sample.request for sample in reversed(samples)])
    assert bits(reversed(totals_of(again))) == bits(totals_of(results))


def test_plugin_alone_gives_the_totals_of_the_scorer(results: list[Any]) -> None:
    scored = [result for result in results if isinstance(result, querl.Score)]
    alone = querl.Reward(REWARD).score([result.episode for result in scored])
    assert bits(totals_of(alone)) == bits(totals_of(scored))
    assert [result.components for result in alone] == [result.components for result in scored]


def test_replay_gives_the_totals_of_the_scorer(results: list[Any], tmp_path: Path) -> None:
    scored = [result for result in results if isinstance(result, querl.Score)]
    with (tmp_path / "episodes.jsonl").open("w", encoding="utf-8") as file:
        for result in scored:
            components = [{"name": name, "value": value} for name, value in result.components.items()]
            outcome = {"scored": {"total": result.total, "components": components}}
            json.dump({"format": 3, "step": STEP, "episode": result.episode, "outcome": outcome}, file, ensure_ascii=False)
            file.write("\n")
    replayed = json.loads(querl_program("plugin", "replay", "episodes.jsonl", "--plugin", str(REWARD), "--json", cwd=tmp_path))
    assert replayed["counts"]["n_scored_by_both"] == len(scored)
    assert replayed["change"]["n_changed"] == 0
    # `n_changed` has a tolerance of 1e-9; these figures have none.
    assert replayed["change"]["mean"]["mean"] == 0.0
    numbers = {side: {name: float(value).hex() for name, value in replayed["totals"][side].items()} for side in ("before", "after")}
    assert numbers["before"] == numbers["after"]
