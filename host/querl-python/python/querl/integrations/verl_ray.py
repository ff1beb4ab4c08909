"""verl 0.9.1 on Ray: reward workers that are started again.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=querl.integrations.verl_ray.RestartingAgentLoopManager

verl starts `reward.num_workers` actors once (`verl/experimental/reward_loop/reward_loop.py`, `_init_reward_loop_workers`) and draws one
for each sample (`verl/experimental/agent_loop/agent_loop.py`, `_compute_score`). After the death of one, each sample that draws it fails,
with asynchronous trainers its group too, until the end of the training. This manager of `trainer.use_v1=true`, the default, replaces them with actors of the
same class that Ray starts again, on another machine where theirs is lost, and whose calls in flight it repeats. Scores do not depend on
that: a call has no state.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.experimental.reward_loop import RewardLoopWorker
from verl.trainer.ppo.v1 import AgentLoopManagerTQ

__all__ = ["RestartingAgentLoopManager", "restarting_workers"]

#: How often a call is repeated. Many: until Ray has noticed that a machine is lost, calls to it are repeated and fail. Not without limit: a
#: sample that ends each process that scores it is an error in the end.
MAX_TASK_RETRIES = 100


def restarting_workers(config: Any, n_workers: int) -> list[Any]:
    """Handles of reward workers that restart without limit, spread over the machines of the cluster as verl spreads its own."""
    node_ids = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    workers = ray.remote(RewardLoopWorker)
    return [
        workers.options(
            max_restarts=-1,
            max_task_retries=MAX_TASK_RETRIES,
            # Soft: a worker whose machine is lost starts on another one.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_ids[index % len(node_ids)], soft=True),
        ).remote(config, None)
        for index in range(n_workers)
    ]


class RestartingAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """The default manager of agent loops, with `restarting_workers` for rewards. A reward model keeps the workers of verl."""

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
