"""querl.integrations.swift in ms-swift's own computation of rewards."""

from __future__ import annotations

from typing import Any

import adapters
import pytest
from conftest import REJECTED_LABEL, Sample

querl = pytest.importorskip("querl")
pytest.importorskip("swift.rewards")


def test_the_functions_are_registered() -> None:
    import querl.integrations.swift as swift
    from swift.rewards import orms

    assert orms["querl"] is swift.QuerlReward and orms["querl_async"] is swift.AsyncQuerlReward


def test_a_rejection_has_the_mean_of_its_group(samples: list[Sample], results: list[Any]) -> None:
    from querl.integrations.swift import QuerlReward

    start = next(at for at in range(0, len(samples), 4) if all(isinstance(one, querl.Score) for one in results[at : at + 4]))
    group = samples[start : start + 4]
    columns = adapters.swift_columns(group)
    columns["querl"][2] = REJECTED_LABEL
    totals = [result.total for result in results[start : start + 4]]
    rewards = QuerlReward()([sample.response for sample in group], trainer_state=adapters.STATE, **columns)
    assert rewards == [totals[0], totals[1], pytest.approx((totals[0] + totals[1] + totals[3]) / 3, abs=1e-15), totals[3]]
    columns["querl"] = [REJECTED_LABEL] * 4
    assert QuerlReward()([sample.response for sample in group], **columns) == [None] * 4


@pytest.mark.parametrize("name", ["querl", "querl_async"])
def test_rewards_of_the_trainer(name: str, samples: list[Sample], results: list[Any]) -> None:
    algorithm, data = pytest.importorskip("swift.rl_core.grpo_algorithm"), pytest.importorskip("swift.rl_core.data")
    import querl.integrations.swift
    import torch
    from swift.rewards import orms

    pairs = [pair for pair in zip(samples, results, strict=True) if isinstance(pair[1], querl.Score)][:8]
    rows = []
    for sample, _ in pairs:
        messages = [*sample.prompt, {"role": "assistant", "content": sample.response}]
        rows.append({"messages": messages, "prompt_id": sample.id, "response_token_ids": [sample.tokens], "querl": sample.id})
    rewards = algorithm.compute_rewards_per_func(
        [data.GRPOSample.from_row(row) for row in rows],
        [orms[name](args=None)],
        [None],
        torch.device("cpu"),
        trainer_state=adapters.STATE,
    )
    assert rewards[:, 0].tolist() == torch.tensor([result.total for _, result in pairs], dtype=torch.float32).tolist()
