"""verl 0.9.1: a custom reward function, and a reward manager that scores samples in batches.

    reward.custom_reward_function.path=pkg://querl.integrations.verl
    +reward.custom_reward_function.reward_kwargs.config=/path/of/querl.toml

or the reward manager, which also passes token counts, steps and groups:

    reward.reward_manager.source=importlib reward.reward_manager.name=QuerlRewardManager
    reward.reward_manager.module.path=pkg://querl.integrations.verl
    +reward.reward_kwargs.querl.config=/path/of/querl.toml

`verl_ray` restarts reward workers that died.

Interface: `verl/trainer/ppo/reward.py` (`get_custom_reward_fn`, `load_reward_manager`),
`verl/experimental/reward_loop/reward_manager/base.py` and `naive.py`. The query is `extra_info["querl"]`, as JSON text
because parquet pads missing keys of structs with null; else `ground_truth`.

A rejection raises `SampleRejected`, because verl has neither a missing score nor a mask for samples. With
`trainer.use_v1=true` (the default) verl then logs the exception and trains on the other samples of the group
(`verl/trainer/ppo/v1/agent_loop_tq.py`, `_run_prompt`); in the async modes it replaces the group. The earlier trainer
stops.
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
        """Type stub of verl's class, which has no type annotations."""

        config: Any
        tokenizer: Any

        def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None: ...

else:
    try:
        from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
    except ImportError:  # `compute_score` works without verl
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
    """Returns the total as `score` and each component as `querl/NAME`. verl calls it in a thread, once per sample.

    Raises SampleRejected for a rejection.
    """
    label = _label(ground_truth, extra_info)
    (result,) = open_scorer(config).score([request(label, solution_str)])
    return _reward(result)


class QuerlRewardManager(RewardManagerBase):
    """Scores samples in batches: those that arrive within `window_ms` are scored in one call.

    Options in `reward.reward_kwargs.querl`, with defaults: `config` (QUERL_CONFIG), `window_ms` (5), `max_batch` (64),
    `group_size` (1), `group_timeout_ms` (60000). Rewards that score groups need `group_size` equal to
    `actor_rollout_ref.rollout.n`, and `reward.num_workers=1`, because verl chooses a random worker for each sample.
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
        """Scores the last sequence of a trajectory, as verl's own managers do.

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
