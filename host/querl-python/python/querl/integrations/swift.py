"""ms-swift 4.6: the reward functions `querl` and `querl_async`.

    # plugin.py
    import querl.integrations.swift

    QUERL_CONFIG=querl.toml swift rlhf --rlhf_type grpo --external_plugins plugin.py --reward_funcs querl ...

Pass your own file to `--external_plugins`, not this one: ms-swift adds the file's folder to `sys.path`, and this folder
has a `trl.py`, which would shadow TRL.

Interface: `swift/rewards/orm.py` (`ORM`, `AsyncORM`, `orms`) and `swift/rl_core/grpo_algorithm.py`,
`compute_rewards_per_func`, which passes completions as strings, each dataset column as a list, and `messages`,
`prompt_id`, `is_truncated`, `response_token_ids`, `trainer_state`.

ms-swift sums rewards with `nansum` (`swift/rl_core/advantage.py`), so None would count as 0. A rejected sample therefore
gets the mean reward of the other samples of its group: its advantage is 0 and the mean of the group does not change. The
standard deviation of the group becomes smaller, so with `scale_rewards` by group the advantages of the other samples are
larger by `sqrt((n - 1) / (n - 1 - n_rejected))` for a group of n.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from swift.rewards import ORM, AsyncORM, orms

from .._querl import Rejection, Score
from . import Config, label_key, label_of, open_scorer, request, sample_indices, text_of, total_of


class QuerlReward(ORM):  # type: ignore[misc]
    """ms-swift reward function `querl`: scores a batch of completions."""

    #: Configuration; a subclass may set it in place of QUERL_CONFIG.
    config: Config = None

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args, **kwargs)
        self.scorer = open_scorer(self.config)

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        """One reward per completion; None if all completions of its group were rejected."""
        requests, groups = _requests(completions, columns)
        return _rewards(self.scorer.score(requests), groups)


class AsyncQuerlReward(AsyncORM):  # type: ignore[misc]
    """ms-swift reward function `querl_async`: scores in a thread, concurrently with other asynchronous reward functions."""

    config: Config = None

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args, **kwargs)
        self.scorer = open_scorer(self.config)

    async def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        requests, groups = _requests(completions, columns)
        return _rewards(await asyncio.to_thread(self.scorer.score, requests), groups)


def _requests(completions: list[Any], columns: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The request and the group of each completion."""
    n = len(completions)
    step = getattr(columns.get("trainer_state"), "global_step", None)
    lists = {name: values for name, values in columns.items() if isinstance(values, (list, tuple)) and len(values) == n}
    rows = [{name: values[index] for name, values in lists.items()} for index in range(n)]
    labels = [label_of(row) for row in rows]
    indices = sample_indices(labels)
    requests = []
    for completion, label, row, index in zip(completions, labels, rows, indices, strict=True):
        messages = row.get("messages") or []
        turns = row.get("response_token_ids") or []
        n_tokens = sum(len(turn) if isinstance(turn, (list, tuple)) else 1 for turn in turns)
        truncated = bool(row.get("is_truncated"))
        prompt = messages[:-1] or None
        requests.append(
            request(label, text_of(completion), prompt=prompt, step=step, sample_index=index, n_tokens=n_tokens, truncated=truncated)
        )
    groups = [str(row.get("prompt_id") or label_key(label)) for row, label in zip(rows, labels, strict=True)]
    return requests, groups


def _rewards(results: Sequence[Score | Rejection], groups: Sequence[str]) -> list[float | None]:
    """The totals. A rejection gets the mean total of its group; None if the group has none."""
    totals = [total_of(result) for result in results]
    scored: defaultdict[str, list[float]] = defaultdict(list)
    for total, group in zip(totals, groups, strict=True):
        if total is not None:
            scored[group].append(total)
    means = {group: sum(values) / len(values) for group, values in scored.items()}
    return [means.get(group) if total is None else total for total, group in zip(totals, groups, strict=True)]


orms["querl"] = QuerlReward
orms["querl_async"] = AsyncQuerlReward
