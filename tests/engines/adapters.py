"""Totals of samples through each integration, called as the engine calls it. None for a rejection."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable
from typing import Any

import pytest
from conftest import N_SAMPLES, STEP, Sample

Totals = list[float | None]
STATE = types.SimpleNamespace(global_step=STEP)


def trl(samples: list[Sample]) -> Totals:
    from querl.integrations.trl import reward_function

    return reward_function()(
        prompts=[sample.prompt for sample in samples],
        completions=[[{"role": "assistant", "content": sample.response}] for sample in samples],
        completion_ids=[sample.tokens for sample in samples],
        querl=[sample.id for sample in samples],
        trainer_state=STATE,
    )


def _or_none(call: Callable[[], float]) -> float | None:
    from querl import SampleRejected

    try:
        return call()
    except SampleRejected:
        return None


def verl_function(samples: list[Sample]) -> Totals:
    from querl.integrations.verl import compute_score

    def one(sample: Sample) -> float:
        return float(compute_score("querl", sample.response, "", {"querl": sample.id, "num_turns": 2})["score"])

    return [_or_none(lambda sample=sample: one(sample)) for sample in samples]


class CharacterTokenizer:
    """A tokenizer whose tokens are characters; 0 is end-of-sequence."""

    eos_token_id = 0

    def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(int(token)) for token in tokens if int(token) != 0)


def verl_data(sample: Sample, label: str | None = None) -> Any:
    """One trajectory, as created by verl/experimental/agent_loop/agent_loop.py (`_compute_score`)."""
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    protocol = pytest.importorskip("verl.protocol")
    tensordict = pytest.importorskip("tensordict")
    responses = torch.tensor([[*map(ord, sample.response), 0]])
    prompts = torch.ones((1, 4), dtype=torch.int64)
    batch = {"prompts": prompts, "responses": responses, "attention_mask": torch.ones((1, 4 + responses.shape[1]), dtype=torch.int64)}
    row = {
        "data_source": "querl",
        "reward_model": {"ground_truth": ""},
        "extra_info": {"querl": label or sample.id},
        "raw_prompt": sample.prompt,
        "uid": f"group-{sample.id}",
        "session_id": sample.index,
        "global_steps": STEP,
    }
    columns = {name: numpy.array([value], dtype=object if isinstance(value, dict) else None) for name, value in row.items()}
    return protocol.DataProto(batch=tensordict.TensorDict(batch, batch_size=1), non_tensor_batch=columns)


def verl_manager(options: dict[str, Any] | None = None) -> Any:
    """The reward manager, loaded as verl loads it."""
    omegaconf = pytest.importorskip("omegaconf")
    reward = pytest.importorskip("verl.trainer.ppo.reward")
    manager = {"source": "importlib", "name": "QuerlRewardManager", "module": {"path": "pkg://querl.integrations.verl"}}
    kwargs = {"querl": options or {}}
    config = {
        "reward": {"custom_reward_function": {"path": None}, "reward_manager": manager, "reward_kwargs": kwargs, "sandbox_fusion": None},
        "actor_rollout_ref": {"rollout": {"response_length": 512}},
    }
    return reward.load_reward_manager(omegaconf.OmegaConf.create(config), CharacterTokenizer())


def verl_batches(samples: list[Sample], options: dict[str, Any] | None = None) -> Totals:
    from querl import SampleRejected

    async def scored() -> list[Any]:
        manager = verl_manager(options)
        calls = [manager.run_single(verl_data(sample)) for sample in samples]
        return await asyncio.gather(*calls, return_exceptions=True)

    totals: Totals = []
    for result in asyncio.run(scored()):
        if isinstance(result, BaseException) and not isinstance(result, SampleRejected):
            raise result
        totals.append(None if isinstance(result, SampleRejected) else result["reward_score"])
    return totals


def verl_groups(samples: list[Sample]) -> Totals:
    return verl_batches(samples, {"group_size": N_SAMPLES, "max_batch": 16})


def swift_columns(samples: list[Sample]) -> dict[str, list[Any]]:
    """Columns as created by swift/rl_core/data.py (`to_reward_row`)."""
    return {
        "messages": [[*sample.prompt, {"role": "assistant", "content": sample.response}] for sample in samples],
        "prompt_id": [sample.id for sample in samples],
        "is_truncated": [False for _ in samples],
        "response_token_ids": [[sample.tokens] for sample in samples],
        "querl": [sample.id for sample in samples],
    }


def swift(samples: list[Sample]) -> Totals:
    pytest.importorskip("swift.rewards")
    from querl.integrations.swift import QuerlReward

    return QuerlReward()([sample.response for sample in samples], trainer_state=STATE, **swift_columns(samples))


def swift_async(samples: list[Sample]) -> Totals:
    pytest.importorskip("swift.rewards")
    from querl.integrations.swift import AsyncQuerlReward

    return asyncio.run(AsyncQuerlReward()([sample.response for sample in samples], trainer_state=STATE, **swift_columns(samples)))


def openrlhf(samples: list[Sample]) -> Totals:
    pytest.importorskip("torch")
    from querl.integrations.openrlhf import reward_func

    def one(sample: Sample) -> float:
        prompt = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in sample.prompt)
        return float(reward_func([f"{prompt}{sample.response}<|im_end|>"], [prompt], [sample.id])["rewards"][0])

    return [_or_none(lambda sample=sample: one(sample)) for sample in samples]


def trace_of(vf: Any, data: Any, sample: Sample) -> Any:
    """A finished trace with one response."""
    graph = pytest.importorskip("verifiers.v1.graph")
    trace = vf.Trace(agent=vf.AgentInfo(config=vf.AgentConfig()), task=vf.TraceTask(type="QuerlTask", data=data))
    answer = vf.AssistantMessage(content=sample.response)
    response = vf.Response(id="", created=0, model="test", message=answer, finish_reason="stop")
    graph.prepare_turn(trace, [vf.UserMessage(content=message["content"]) for message in sample.prompt]).commit(response)
    return trace


def verifiers(samples: list[Sample]) -> Totals:
    vf = pytest.importorskip("verifiers.v1")
    from querl.integrations.verifiers import QuerlData, QuerlTask

    async def one(sample: Sample) -> float | None:
        task = QuerlTask(QuerlData(querl=sample.id, prompt="x"))
        trace = trace_of(vf, task.data, sample)
        try:
            await task.score(trace)
        except vf.TaskError as error:
            assert type(error.__cause__).__name__ == "SampleRejected", error
            return None
        return float(trace.reward)

    async def scored() -> Totals:
        return list(await asyncio.gather(*[one(sample) for sample in samples]))

    return asyncio.run(scored())


#: Integrations by name whose totals have double precision.
EXACT: dict[str, Callable[[list[Sample]], Totals]] = {
    "trl": trl,
    "verl_function": verl_function,
    "verl_batches": verl_batches,
    "verl_groups": verl_groups,
    "swift": swift,
    "swift_async": swift_async,
    "verifiers": verifiers,
}
