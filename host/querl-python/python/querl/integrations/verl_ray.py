"""verl 0.9.1 on Ray: reward workers that Ray restarts when they die.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=querl.integrations.verl_ray.RestartingAgentLoopManager

verl starts `reward.num_workers` actors once (`verl/experimental/reward_loop/reward_loop.py`, `_init_reward_loop_workers`) and chooses
a random one for each sample (`verl/experimental/agent_loop/agent_loop.py`, `_compute_score`). If an actor dies, all later samples that
are sent to it fail; with asynchronous trainers their groups fail too. This manager for `trainer.use_v1=true` (the default) replaces the
actors by actors of the same class with `max_restarts` and `max_task_retries`: Ray restarts them, on another node if theirs is lost, and
repeats their calls in flight. Calls are stateless, so a repeated call gives the same score.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.experimental.reward_loop import RewardLoopWorker
from verl.trainer.ppo.v1 import AgentLoopManagerTQ

__all__ = ["RestartingAgentLoopManager", "restarting_workers"]

#: `max_task_retries` of the actors. High, because calls to a lost node fail until Ray detects the loss. Finite, because a sample that
#: crashes every worker has to fail in the end.
MAX_TASK_RETRIES = 100


def restarting_workers(config: Any, n_workers: int) -> list[Any]:
    """Handles of reward workers with unlimited restarts, placed on the nodes of the cluster round-robin, as in verl."""
    node_ids = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    workers = ray.remote(RewardLoopWorker)
    return [
        workers.options(
            max_restarts=-1,
            max_task_retries=MAX_TASK_RETRIES,
            # Soft affinity: a worker whose node is lost restarts on another one.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_ids[index % len(node_ids)], soft=True),
        ).remote(config, None)
        for index in range(n_workers)
    ]


class RestartingAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's default agent loop manager with `restarting_workers`. With a reward model verl's own workers are kept."""

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: list[Any] | None = None,
    ) -> None:
        if reward_loop_worker_handles and not config.reward.reward_model.enable:
            for worker in reward_loop_worker_handles:
                ray.kill(worker)
            reward_loop_worker_handles = restarting_workers(config, len(reward_loop_worker_handles))
        super().__init__(config, llm_client, teacher_client, reward_loop_worker_handles)
