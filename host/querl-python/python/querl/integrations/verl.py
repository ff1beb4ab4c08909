"""verl 0.9.1: a custom reward function, and a reward manager that joins samples into batches.

    reward.custom_reward_function.path=pkg://querl.integrations.verl
    +reward.custom_reward_function.reward_kwargs.config=/path/of/querl.toml

or, with batches, tokens, steps and groups:

    reward.reward_manager.source=importlib reward.reward_manager.name=QuerlRewardManager
    reward.reward_manager.module.path=pkg://querl.integrations.verl
    +reward.reward_kwargs.querl.config=/path/of/querl.toml

`verl_ray` keeps the workers that compute them alive.

Interface: `verl/trainer/ppo/reward.py` (`get_custom_reward_fn`, `load_reward_manager`),
`verl/experimental/reward_loop/reward_manager/base.py` and `naive.py`. The query is in `extra_info["querl"]`, one text,
since parquet pads missing keys of structs; else in `ground_truth`.

A rejection raises `SampleRejected`: verl has no score that means none, and no mask in the path of rewards. The trainer
of `trainer.use_v1=true`, the default, then trains on the other samples of the group
(`verl/trainer/ppo/v1/agent_loop_tq.py`, `_run_prompt`; in the async modes the group is replaced), and logs the
exception with its code. The earlier trainer stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._querl import Rejection, Score
from . import Config, MicroBatcher, label_of, open_scorer, rejections, request, total_or_raise

if TYPE_CHECKING:

    class RewardManagerBase:
        """Stands for verl's class, which has no types."""

        config: Any
        tokenizer: Any

        def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None: ...

else:
    try:
        from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
    except ImportError:  # `compute_score` needs nothing of verl
        RewardManagerBase = object

logger = logging.getLogger(__name__)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    config: Config = None,
    **_: Any,
) -> dict[str, Any]:
    """The total as `score`, and each component as `querl/NAME`. verl calls it in a thread, once for each sample.

    Raises SampleRejected for a rejection.
    """
    label = _label(ground_truth, extra_info)
    (result,) = open_scorer(config).score([request(label, solution_str)])
    return _reward(result)


class QuerlRewardManager(RewardManagerBase):
    """Scores samples in batches: those that arrive within some milliseconds are one call.

    Options in `reward.reward_kwargs.querl`: `config`, `window_ms` (5), `max_batch` (64). For rewards that score groups:
    `group_size`, which is `actor_rollout_ref.rollout.n`, `group_timeout_ms` (60000), and `reward.num_workers=1`, since
    verl draws a worker for each sample.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        options = dict((config.reward.get("reward_kwargs") or {}).get("querl") or {})
        self.batcher = MicroBatcher(open_scorer(options.pop("config", None)), **options)
        rollout = (config.get("actor_rollout_ref") or {}).get("rollout") or {}
        self.max_tokens = rollout.get("response_length")

    async def run_single(self, data: Any) -> dict[str, Any]:
        """The score of the last sequence of a trajectory, as verl's own managers.

        Raises SampleRejected for a rejection.
        """
        item = data[-1:][0]
        row = item.non_tensor_batch
        tokens = item.batch["responses"]
        n_tokens = int(item.batch["attention_mask"][-tokens.shape[-1] :].sum())
        tokens = tokens[:n_tokens]
        response = await asyncio.to_thread(self.tokenizer.decode, tokens, skip_special_tokens=True)
        ground_truth = (row.get("reward_model") or {}).get("ground_truth")
        step = int(row.get("global_steps", -1))
        asked = request(
            _label(ground_truth, row.get("extra_info")),
            response,
            prompt=row.get("raw_prompt"),
            step=step if step >= 0 else None,
            sample_index=int(row.get("session_id", 0)),
            n_tokens=n_tokens,
            truncated=self._is_truncated(tokens, n_tokens),
        )
        reward = _reward(await self.batcher.score(asked, group=row.get("uid")))
        return {"reward_score": reward["score"], "reward_extra_info": reward}

    def _is_truncated(self, tokens: Any, n_tokens: int) -> bool:
        at_limit = self.max_tokens is not None and 0 < self.max_tokens <= n_tokens
        return at_limit and int(tokens[-1]) != self.tokenizer.eos_token_id


def _label(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> Any:
    return label_of({"querl": ground_truth or None, **{name: value for name, value in (extra_info or {}).items() if value is not None}})


def _reward(result: Score | Rejection) -> dict[str, Any]:
    if isinstance(result, Rejection):
        logger.warning("rejected: %s: %s; %d rejections in this process", result.code, result.detail, rejections.total() + 1)
    total = total_or_raise(result)
    components = result.components if isinstance(result, Score) else {}
    return {"score": total, **{f"querl/{name}": value for name, value in components.items()}}
