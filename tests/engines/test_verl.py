"""querl.integrations.verl, called directly and loaded by verl."""

from __future__ import annotations

import asyncio
from typing import Any

import adapters
import pytest
from conftest import N_SAMPLES, REJECTED_CODE, REJECTED_LABEL, Sample

querl = pytest.importorskip("querl")
from querl.integrations import MicroBatcher, rejections  # noqa: E402
from querl.integrations.verl import compute_score  # noqa: E402


class Counting:
    """Records the number of requests of each call of a scorer."""

    def __init__(self, scorer: Any) -> None:
        self.scorer, self.sizes = scorer, []

    def score(self, requests: list[dict[str, Any]]) -> list[Any]:
        self.sizes.append(len(requests))
        return list(self.scorer.score(requests))


def test_components_are_extra_information(samples: list[Sample], results: list[Any]) -> None:
    position = next(index for index, result in enumerate(results) if isinstance(result, querl.Score))
    sample, result = samples[position], results[position]
    reward = compute_score("querl", sample.response, sample.id, None)
    assert reward == {"score": result.total, **{f"querl/{name}": value for name, value in result.components.items()}}


def test_a_rejection_is_raised_and_counted() -> None:
    before = rejections[REJECTED_CODE]
    with pytest.raises(querl.SampleRejected) as raised:
        compute_score("querl", "鱼油", "", {"querl": REJECTED_LABEL})
    assert raised.value.code == REJECTED_CODE and rejections[REJECTED_CODE] == before + 1


def test_requests_of_one_loop_are_one_call(scorer: Any, samples: list[Sample], results: list[Any]) -> None:
    counting = Counting(scorer)

    async def scored(batcher: MicroBatcher, grouped: bool) -> list[Any]:
        calls = [batcher.score(sample.request, group=sample.id if grouped else None) for sample in samples[:20]]
        return await asyncio.gather(*calls)

    found = asyncio.run(scored(MicroBatcher(counting, max_batch=8), grouped=False))
    assert [repr(one) for one in found] == [repr(one) for one in results[:20]]
    assert counting.sizes == [8, 8, 4]
    counting.sizes.clear()
    asyncio.run(scored(MicroBatcher(counting, max_batch=8, group_size=N_SAMPLES), grouped=True))
    assert sum(counting.sizes) == 20 and all(size % N_SAMPLES == 0 for size in counting.sizes)


def test_an_incomplete_group_is_scored_after_its_time(scorer: Any, samples: list[Sample]) -> None:
    counting = Counting(scorer)

    async def scored() -> Any:
        batcher = MicroBatcher(counting, group_size=N_SAMPLES, group_timeout_ms=10)
        return await asyncio.gather(*[batcher.score(sample.request, group="g") for sample in samples[:2]])

    assert len(asyncio.run(scored())) == 2 and counting.sizes == [2]


def test_an_error_of_a_call_is_that_of_its_requests(scorer: Any) -> None:
    async def scored() -> list[Any]:
        batcher = MicroBatcher(scorer)
        calls = [batcher.score({"query": "nobody", "response": "鱼油"}) for _ in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(error, querl.QuerlError) and "nobody" in str(error) for error in asyncio.run(scored()))


def test_the_custom_function_is_loaded_with_its_arguments(run: Any, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    omegaconf, reward = pytest.importorskip("omegaconf"), pytest.importorskip("verl.trainer.ppo.reward")
    monkeypatch.delenv("QUERL_CONFIG")
    function = {"path": "pkg://querl.integrations.verl", "name": "compute_score", "reward_kwargs": {"config": str(run)}}
    loaded = reward.get_custom_reward_fn(omegaconf.OmegaConf.create({"reward": {"custom_reward_function": function}}))
    sample = samples[0]
    found = loaded(data_source="querl", solution_str=sample.response, ground_truth="", extra_info={"querl": sample.id})
    assert found == compute_score("querl", sample.response, sample.id, config=str(run))


def test_the_manager_is_loaded_and_rejects(samples: list[Sample]) -> None:
    async def one(label: str | None) -> dict[str, Any]:
        manager = adapters.verl_manager({"window_ms": 1, "max_batch": 8})
        return dict(await manager.run_single(adapters.verl_data(samples[0], label)))

    found = asyncio.run(one(None))
    assert found["reward_score"] == found["reward_extra_info"]["score"]
    with pytest.raises(querl.SampleRejected):
        asyncio.run(one(REJECTED_LABEL))
