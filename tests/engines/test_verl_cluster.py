"""Rewards of exported rows in verl's reward workers on a local Ray cluster of two nodes, while workers and a node are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Sample

querl = pytest.importorskip("querl")
ray = pytest.importorskip("ray")
pytest.importorskip("transfer_queue", reason="verl's trainer needs TransferQueue: setup.sh")
pytest.importorskip("verl.trainer.ppo.v1", exc_type=ImportError)
import verl_cluster as on_ray  # noqa: E402

N_ROWS = 80
CLASS = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=querl.integrations.verl_ray.RestartingAgentLoopManager"
MANAGER = [
    "reward.reward_manager.source=importlib",
    "reward.reward_manager.name=QuerlRewardManager",
    "reward.reward_manager.module.path=pkg://querl.integrations.verl",
    "reward.custom_reward_function.path=null",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with on_ray.two_nodes() as found:
        yield found


@pytest.fixture(scope="module")
def overrides(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*on_ray.settings(exported, tmp_path_factory.mktemp("settings")), *on_ray.SMALL]


@pytest.fixture(scope="module")
def trainer(overrides: list[str]) -> Any:
    """verl's trainer with its tokenizer and datasets, before it requests GPUs."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import get_trainer_cls

    config = on_ray.compose(overrides)
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    made = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
    made._init_tokenizer()
    made._init_dataloader()
    return made


@pytest.fixture(scope="module")
def rows(trainer: Any) -> list[dict[str, Any]]:
    return [trainer.train_dataset[index] for index in range(N_ROWS)]


@pytest.fixture(scope="module")
def responses(rows: list[dict[str, Any]], samples: list[Sample], trainer: Any) -> list[str]:
    found = on_ray.responses_of(rows, samples[1:])
    for text in found:
        assert trainer.tokenizer.decode(trainer.tokenizer.encode(text, add_special_tokens=False)) == text
    return found


@pytest.fixture(scope="module")
def totals(scorer: Any, rows: list[dict[str, Any]], responses: list[str]) -> list[str]:
    """The host's totals for the run itself, not the exported folder, as exact text."""
    requests = [{"query": row["reward_model"]["ground_truth"], "response": text} for row, text in zip(rows, responses, strict=True)]
    results = scorer.score(requests)
    assert all(isinstance(result, querl.Score) for result in results)
    assert len({result.total for result in results}) > N_ROWS // 8
    return [result.total.hex() for result in results]


def calls(workers: list[Any], trainer: Any, rows: list[dict[str, Any]], responses: list[str]) -> list[Any]:
    """Calls the workers in turn; agent loops choose a worker at random for each sample."""
    data = [on_ray.trajectory(trainer.tokenizer, row, text) for row, text in zip(rows, responses, strict=True)]
    return [workers[index % len(workers)].compute_score.remote(one) for index, one in enumerate(data)]


def scores(references: list[Any]) -> list[str]:
    return [result["reward_score"].hex() for result in ray.get(references, timeout=on_ray.TIMEOUT_S)]


def kill_in_the_middle(process: int, references: list[Any], of_the_worker: list[Any]) -> None:
    """Kills a worker that was suspended before its calls were sent, after other workers have answered some calls."""
    ray.wait([one for one in references if one not in of_the_worker], num_returns=8, timeout=on_ray.TIMEOUT_S)
    _, pending = ray.wait(of_the_worker, num_returns=len(of_the_worker), timeout=0)
    assert pending == of_the_worker
    os.kill(process, signal.SIGKILL)


def test_workers_of_verl_on_both_nodes_give_the_totals_of_the_host(
    cluster: Any, overrides: list[str], trainer: Any, rows: list[Any], responses: list[str], totals: list[str]
) -> None:
    from verl.experimental.reward_loop import RewardLoopManager

    workers = RewardLoopManager(on_ray.compose(overrides)).reward_loop_worker_handles
    try:
        assert len({on_ray.process_and_node(worker)[1] for worker in workers}) == 2
        assert scores(calls(workers, trainer, rows, responses)) == totals
        # Without restarts a killed worker is not replaced: the reason for RestartingAgentLoopManager.
        os.kill(on_ray.process_and_node(workers[0])[0], signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(calls(workers[:1], trainer, rows[:1], responses[:1]), timeout=on_ray.TIMEOUT_S)
    finally:
        for worker in workers:
            ray.kill(worker)


@pytest.mark.parametrize("form", ["function", "manager"])
def test_nothing_is_lost_when_a_worker_is_killed(
    form: str, cluster: Any, exported: Path, overrides: list[str], trainer: Any, rows: list[Any], responses: list[str], totals: list[str]
) -> None:
    from querl.integrations.verl_ray import restarting_workers

    manager = [*MANAGER, f'+reward.reward_kwargs.querl.config="{exported / "querl.toml"}"']
    workers = restarting_workers(on_ray.compose([*overrides, *(manager if form == "manager" else [])]), 2)
    try:
        before = [on_ray.process_and_node(worker) for worker in workers]
        assert len({node for _, node in before}) == 2
        os.kill(before[0][0], signal.SIGSTOP)
        references = calls(workers, trainer, rows, responses)
        kill_in_the_middle(before[0][0], references, references[:: len(workers)])
        assert scores(references) == totals
        after = [on_ray.process_and_node(worker) for worker in workers]
        assert after[0][0] != before[0][0] and after[1:] == before[1:]
    finally:
        for worker in workers:
            ray.kill(worker)


def test_agent_loops_of_verl_lose_nothing_when_a_worker_is_killed(
    cluster: Any, overrides: list[str], trainer: Any, rows: list[Any], responses: list[str], totals: list[str]
) -> None:
    """The part of `TaskRunnerV1` of verl.trainer.main_ppo between the rollout servers, which are replaced, and the update."""
    import numpy
    import transfer_queue as tq
    from verl.experimental.reward_loop import RewardLoopManager
    from verl.utils import tensordict_utils
    from verl.utils.dataset.rl_dataset import collate_fn
    from verl.utils.import_utils import load_class_from_fqn
    from verl.utils.tokenizer import normalize_token_ids

    config = on_ray.compose(list(dict.fromkeys([*overrides, CLASS])))
    config.transfer_queue.enable = True
    tq.init(config.transfer_queue)
    try:
        manager_class = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class, "AgentLoopManager")
        prompts = [
            tuple(normalize_token_ids(trainer.tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, tokenize=True)))
            for row in rows
        ]
        chosen = dict(zip(prompts, zip(responses, totals, strict=True), strict=True))
        answers = on_ray.Answers(trainer.tokenizer, {prompt: response for prompt, (response, _) in chosen.items()})
        manager = manager_class.create(
            config=config,
            llm_client=answers,
            teacher_client=None,
            reward_loop_worker_handles=RewardLoopManager(config).reward_loop_worker_handles,
        )
        killed = on_ray.process_and_node(manager.reward_loop_worker_handles[0])[0]
        batch = collate_fn(rows)
        batch["uid"] = numpy.array([f"prompt{index}" for index in range(N_ROWS)], dtype=object)
        data = tensordict_utils.get_tensordict(batch)
        tensordict_utils.assign_non_tensor_data(data, "global_steps", 1)
        os.kill(killed, signal.SIGSTOP)
        manager.generate_sequences(data)

        def statuses() -> list[str]:
            tags = tq.kv_list("train").get("train", {})
            return [tags.get(uid, {}).get("status", "none") for uid in batch["uid"]]

        on_ray.wait_until(lambda: statuses().count("finished") >= N_ROWS // 4)
        assert "running" in statuses()
        os.kill(killed, signal.SIGKILL)
        on_ray.wait_until(lambda: statuses() == ["finished"] * N_ROWS)
        stored = tq.kv_batch_get([f"{uid}_0_0" for uid in batch["uid"]], "train", select_fields=["prompts", "extra_fields", "rm_scores"])
        extra = [fields["reward_extra_info"]["score"] for fields in stored["extra_fields"]]
        expected = [chosen[tuple(prompt.tolist())][1] for prompt in stored["prompts"].unbind()]
        assert [score.hex() for score in extra] == expected
        on_tokens = [scores.tolist() for scores in stored["rm_scores"].unbind()]
        assert [one[-1] for one in on_tokens] == numpy.float32(extra).tolist() and not any(any(one[:-1]) for one in on_tokens)
    finally:
        tq.close()


def test_nothing_is_lost_when_a_node_is_lost(
    cluster: Any, overrides: list[str], trainer: Any, rows: list[Any], responses: list[str], totals: list[str]
) -> None:
    """The last test, because it kills the second node."""
    from querl.integrations.verl_ray import restarting_workers

    workers = restarting_workers(on_ray.compose(overrides), 2)
    (lost,) = cluster.worker_nodes
    processes = {node: process for process, node in map(on_ray.process_and_node, workers)}
    assert lost.node_id in processes and len(processes) == 2
    os.kill(processes[lost.node_id], signal.SIGSTOP)
    references = calls(workers, trainer, rows, responses)
    cluster.remove_node(lost, allow_graceful=False)
    assert scores(references) == totals
    assert {on_ray.process_and_node(worker)[1] for worker in workers} == {cluster.head_node.node_id}
