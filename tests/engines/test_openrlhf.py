"""querl.integrations.openrlhf, called directly and loaded by OpenRLHF."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from conftest import REJECTED_CODE, REJECTED_LABEL, Sample

querl = pytest.importorskip("querl")
from querl.integrations.openrlhf import response_of, reward_func  # noqa: E402


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("P:鱼油 用量<|im_end|>", "鱼油 用量"),
        ("P:鱼油 用量<|im_end|><|endoftext|>", "鱼油 用量"),
        ("P:<|im_end|>鱼油\n", "<|im_end|>鱼油\n"),
        ("P:</s>", ""),
    ],
)
def test_response_is_what_follows_the_prompt(query: str, expected: str) -> None:
    assert response_of(query, "P:") == expected


def test_a_sequence_without_its_prompt_is_an_error() -> None:
    with pytest.raises(querl.QuerlError, match="does not begin with its prompt"):
        response_of("鱼油", "P:")


def test_scores_are_the_rewards(samples: list[Sample], results: list[Any]) -> None:
    torch = pytest.importorskip("torch")
    pairs = [pair for pair in zip(samples, results, strict=True) if isinstance(pair[1], querl.Score)][:8]
    found = reward_func([f"P:{sample.response}</s>" for sample, _ in pairs], ["P:"] * 8, [sample.id for sample, _ in pairs])
    expected = torch.tensor([result.total for _, result in pairs], dtype=torch.float32).tolist()
    assert found["rewards"].tolist() == found["scores"].tolist() == expected
    assert found["extra_logs"]["rejected"].tolist() == [0.0] * 8


def test_a_rejection_is_raised_or_dropped_by_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    with pytest.raises(querl.SampleRejected, match=REJECTED_CODE):
        reward_func(["P:鱼油</s>"], ["P:"], [REJECTED_LABEL])
    monkeypatch.setenv("QUERL_REJECTED", "drop")
    found = reward_func(["P:鱼油</s>"], ["P:"], [REJECTED_LABEL])
    assert math.isnan(found["rewards"]) and found["extra_logs"]["rejected"].tolist() == [1.0]
    # The condition of `_generate_vllm` in openrlhf/trainer/ppo_utils/samples_generator.py for keeping a prompt.
    assert not -math.inf < found["scores"].item() < math.inf


def test_a_prompt_without_a_label_is_an_error() -> None:
    pytest.importorskip("torch")
    with pytest.raises(querl.QuerlError, match="--data.label_key"):
        reward_func(["P:鱼油</s>"], ["P:"], [None])


def test_the_executor_calls_the_function_of_a_file(samples: list[Sample], results: list[Any], tmp_path: Path) -> None:
    agent = pytest.importorskip("openrlhf.utils.agent")
    position = next(index for index, result in enumerate(results) if isinstance(result, querl.Score))
    sample, file = samples[position], tmp_path / "reward.py"
    file.write_text("from querl.integrations.openrlhf import reward_func\n")
    executor = agent.SingleTurnAgentExecutor(str(file))
    (found,) = asyncio.run(executor._fetch_rewards_via_func([f"P:{sample.response}<|im_end|>"], ["P:"], [sample.id]))
    assert found["rewards"].shape == (1,) and found["rewards"].item() == pytest.approx(results[position].total, abs=1e-7)
