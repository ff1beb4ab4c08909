"""TRL 1.16: a reward function for `GRPOTrainer`, `RLOOTrainer` and `AsyncGRPOTrainer`.

    trainer = GRPOTrainer(model, reward_funcs=reward_function("querl.toml"), ...)

Interface: `trl/trainer/grpo_trainer.py`, `GRPOTrainer._calculate_rewards`, which passes keyword arguments: each dataset
column as a list with one value per completion, `trainer_state`, `log_extra(column, values)` and
`log_metric(name, value)`. A reward of None becomes NaN: TRL leaves the completion out of its group's mean, and its advantage is 0.

Every call logs the same column and metric names, whatever its batch contains: TRL gathers the names one by one over all
processes, and its table of completions needs one value per completion in each column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from .._querl import Rejection, Score
from . import Config, label_of, open_scorer, request, sample_indices, text_of, total_of


class RewardFunction:
    """Scores a batch of completions. Can be pickled, which the worker process of `AsyncGRPOTrainer` requires."""

    def __init__(self, config: Config = None, *, eos_token_ids: Collection[int] = (), name: str = "querl") -> None:
        self.scorer = open_scorer(config)
        self.eos_token_ids = frozenset(eos_token_ids)
        #: Name of the reward in TRL's metrics: `rewards/querl/mean`.
        self.__name__ = name

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        trainer_state: Any = None,
        **columns: Any,
    ) -> list[float | None]:
        """One total per completion; None for a rejection."""
        n = len(completions)
        columns = {name: values for name, values in columns.items() if isinstance(values, (list, tuple)) and len(values) == n}
        labels = [label_of({name: values[index] for name, values in columns.items()}) for index in range(n)]
        indices = sample_indices(labels)
        tokens = completion_ids if completion_ids is not None else [[]] * n
        step = getattr(trainer_state, "global_step", None)
        requests = [
            request(
                labels[index],
                text_of(completions[index]),
                prompt=prompts[index],
                step=step,
                sample_index=indices[index],
                n_tokens=len(tokens[index]),
                truncated=self._is_truncated(tokens[index]),
            )
            for index in range(n)
        ]
        results = self.scorer.score(requests)
        codes = [result.code if isinstance(result, Rejection) else "" for result in results]
        if log_extra is not None:
            components = [result.components if isinstance(result, Score) else {} for result in results]
            log_extra("querl/components", [json.dumps(one, ensure_ascii=False) for one in components])
            log_extra("querl/rejected", codes)
        if log_metric is not None:
            log_metric("querl/rejected", sum(map(bool, codes)) / n if n else 0.0)
        return [total_of(result) for result in results]

    def _is_truncated(self, tokens: list[int]) -> bool:
        """As in TRL: the last token is not an end-of-sequence token. False if `eos_token_ids` is empty."""
        return bool(self.eos_token_ids) and bool(tokens) and tokens[-1] not in self.eos_token_ids


def reward_function(config: Config = None, *, eos_token_ids: Collection[int] = (), name: str = "querl") -> RewardFunction:
    """The reward function of a configuration or a scorer.

    eos_token_ids: ids of the end-of-sequence and padding tokens. A completion whose last token is not one of them counts as
        truncated by the token limit. If empty, no completion counts as truncated.
    name: name of the reward in TRL's metrics.
    """
    return RewardFunction(config, eos_token_ids=eos_token_ids, name=name)
