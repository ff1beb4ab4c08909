"""OpenRLHF 0.11.2: `reward_func`, for `--reward.remote_url` with a Python file.

    # reward.py
    from querl.integrations.openrlhf import reward_func

    QUERL_CONFIG=/path/of/querl.toml python -m openrlhf.cli.train_ppo_ray --reward.remote_url reward.py --data.label_key querl ...

Interface: `openrlhf/utils/agent.py`, `SingleTurnAgentExecutor`: one call per sample, in a thread. `queries`: prompt and
response, decoded with special tokens. `prompts`: the text of the prompt. `labels`: the column `--data.label_key`. The
result has the tensors `rewards` and `scores` (equal; dynamic filtering reads `scores`), of shape (n,), and `extra_logs`.
OpenRLHF does not pass the finish reason, so every response counts as complete.

OpenRLHF cannot represent a sample without a reward. With `--algo.dynamic_filtering_enable`, set QUERL_REJECTED=drop: a
rejected sample gets NaN, which is outside of the filter's score range, so OpenRLHF samples another prompt instead.
Without dynamic filtering NaN would reach the loss; then a rejection raises `SampleRejected`, which ends the training.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from .._querl import QuerlError
from . import Config, label_of, open_scorer, request, sample_indices, total_of, total_or_raise

#: End-of-turn and end-of-sequence tokens, the same as in `querl serve reward`. Qwen; Llama 3; Llama 2 and Mistral; Gemma; Phi; DeepSeek.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "</s>",
    "<end_of_turn>",
    "<|end|>",
    "<｜end▁of▁sentence｜>",
)


def reward_func(
    queries: Sequence[str],
    prompts: Sequence[str],
    labels: Sequence[Any],
    *,
    config: Config = None,
    **_: Any,
) -> dict[str, Any]:
    """Scores the responses in `queries`.

    A rejection raises SampleRejected, or gives NaN if QUERL_REJECTED is `drop`.
    """
    import torch

    requests = []
    for query, prompt, label, index in zip(queries, prompts, labels, sample_indices(labels), strict=True):
        if label is None or label == "":
            raise QuerlError("a prompt has no label; expected `--data.label_key` to name the column with the query or its id")
        requests.append(request(label_of({"querl": label}), response_of(query, prompt), sample_index=index))
    number: Callable[[Any], float] = _nan_for_rejection if os.environ.get("QUERL_REJECTED") == "drop" else total_or_raise
    totals = [number(result) for result in open_scorer(config).score(requests)]
    rewards = torch.tensor(totals, dtype=torch.float32)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"rejected": torch.isnan(rewards).float()}}


def _nan_for_rejection(result: Any) -> float:
    total = total_of(result)
    return math.nan if total is None else total


def response_of(query: str, prompt: str) -> str:
    """The response in a decoded sequence, without trailing end tokens."""
    if not query.startswith(prompt):
        # OpenRLHF truncates the start of a long prompt in the sequence, but not in `prompts`.
        raise QuerlError("the sequence does not begin with its prompt; raise --data.max_len, or leave long prompts out")
    response = query[len(prompt) :]
    while (end := next((token for token in END_TOKENS if response.endswith(token)), None)) is not None:
        response = response.removesuffix(end)
    return response
