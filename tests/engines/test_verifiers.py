"""querl.integrations.verifiers in the scoring of verifiers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import adapters
import pytest
from conftest import REJECTED_LABEL, Sample

querl = pytest.importorskip("querl")
vf = pytest.importorskip("verifiers.v1")
from querl.integrations import verifiers as integration  # noqa: E402


def test_components_are_metrics_of_the_trace(samples: list[Sample], results: list[Any]) -> None:
    position = next(index for index, result in enumerate(results) if isinstance(result, querl.Score))
    sample, result = samples[position], results[position]
    task = integration.QuerlTask(integration.QuerlData(querl=sample.id, prompt="x"))
    trace = adapters.trace_of(vf, task.data, sample)
    asyncio.run(task.score(trace))
    assert trace.rewards["querl"].score == result.total
    assert trace.metrics == {f"querl/{name}": value for name, value in result.components.items()}


def test_a_rejection_is_an_error_and_no_reward(samples: list[Sample]) -> None:
    task = integration.QuerlTask(integration.QuerlData(querl=REJECTED_LABEL, prompt="x"))
    trace = adapters.trace_of(vf, task.data, samples[0])
    with pytest.raises(vf.TaskError, match="querl rejected the sample"):
        asyncio.run(task.score(trace))
    assert trace.rewards == {"querl": None}


def test_taskset_has_the_queries_and_prompts_of_the_run(run: Path, samples: list[Sample]) -> None:
    config = integration.QuerlTasksetConfig(task=integration.QuerlTaskConfig(config=str(run)))
    tasks = list(integration.QuerlTaskset(config).take(3))
    assert [task.data.querl for task in tasks] == [task.data.id for task in tasks] == [sample.id for sample in samples[:12:4]]
    prompt = samples[0].prompt
    assert tasks[0].data.system_prompt == "\n\n".join(one["content"] for one in prompt if one["role"] == "system") or None
    assert [message.content for message in tasks[0].data.prompt] == [one["content"] for one in prompt if one["role"] != "system"]


def test_the_function_is_plugged_into_another_task(samples: list[Sample], results: list[Any]) -> None:
    class OwnData(vf.TaskData):
        querl: str

    position = next(index for index, result in enumerate(results) if isinstance(result, querl.Score))
    reward = {"querl": {"fn": "querl.integrations.verifiers:querl", "weight": 0.5}}
    task = vf.Task(OwnData(querl=samples[position].id, prompt="x"), vf.TaskConfig(rewards=reward))
    trace = adapters.trace_of(vf, task.data, samples[position])
    asyncio.run(task.score(trace))
    assert trace.rewards["querl"].value == 0.5 * results[position].total
