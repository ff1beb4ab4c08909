"""querl.integrations.swift in ms-swift's computation of rewards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import adapters
import pytest
from conftest import REJECTED_LABEL, Sample

querl = pytest.importorskip("querl")
pytest.importorskip("swift.rewards")


def test_the_functions_are_registered() -> None:
    import querl.integrations.swift as swift
    from swift.rewards import orms

    assert orms["querl"] is swift.QuerlReward and orms["querl_async"] is swift.AsyncQuerlReward


def test_a_rejection_has_the_mean_of_its_group(samples: list[Sample], results: list[Any]) -> None:
    from querl.integrations.swift import QuerlReward

    start = next(at for at in range(0, len(samples), 4) if all(isinstance(one, querl.Score) for one in results[at : at + 4]))
    group = samples[start : start + 4]
    columns = adapters.swift_columns(group)
    columns["querl"][2] = REJECTED_LABEL
    totals = [result.total for result in results[start : start + 4]]
    rewards = QuerlReward()([sample.response for sample in group], trainer_state=adapters.STATE, **columns)
    assert rewards == [totals[0], totals[1], pytest.approx((totals[0] + totals[1] + totals[3]) / 3, abs=1e-15), totals[3]]
    columns["querl"] = [REJECTED_LABEL] * 4
    assert QuerlReward()([sample.response for sample in group], **columns) == [None] * 4


@pytest.mark.parametrize("name", ["querl", "querl_async"])
def test_rewards_of_the_trainer(name: str, samples: list[Sample], results: list[Any]) -> None:
    algorithm, data = pytest.importorskip("swift.rl_core.grpo_algorithm"), pytest.importorskip("swift.rl_core.data")
    import querl.integrations.swift
    import torch
    from swift.rewards import orms

    pairs = [pair for pair in zip(samples, results, strict=True) if isinstance(pair[1], querl.Score)][:8]
    rows = []
    for sample, _ in pairs:
        messages = [*sample.prompt, {"role": "assistant", "content": sample.response}]
        rows.append({"messages": messages, "prompt_id": sample.id, "response_token_ids": [sample.tokens], "querl": sample.id})
    rewards = algorithm.compute_rewards_per_func(
        [data.GRPOSample.from_row(row) for row in rows],
        [orms[name](args=None)],
        [None],
        torch.device("cpu"),
        trainer_state=adapters.STATE,
    )
    assert rewards[:, 0].tolist() == torch.tensor([result.total for _, result in pairs], dtype=torch.float32).tolist()


@pytest.mark.parametrize("name", ["querl", "querl_async"])
def test_the_plugin_loader_registers_the_functions(name: str, run: Any, samples: list[Sample], results: list[Any], tmp_path: Path) -> None:
    """`--external_plugins plugin.py --reward_funcs NAME` in a process that has not imported the integration."""
    (tmp_path / "plugin.py").write_text("import querl.integrations.swift\n")
    pairs = [pair for pair in zip(samples, results, strict=True) if isinstance(pair[1], querl.Score)][:8]
    columns = adapters.swift_columns([sample for sample, _ in pairs])
    (tmp_path / "columns.json").write_text(json.dumps(columns), encoding="utf-8")
    (tmp_path / "load.py").write_text(LOAD)
    environment = {**os.environ, "QUERL_CONFIG": str(run)}
    command = [sys.executable, "load.py", name, str(adapters.STATE.global_step)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    if "no ms-swift arguments" in ended.stdout:
        pytest.skip(ended.stdout.strip())
    assert json.loads(ended.stdout.splitlines()[-1]) == [result.total.hex() for _, result in pairs]


LOAD = """
import asyncio, inspect, json, sys, types
try:
    from swift.arguments import BaseArguments
    from swift.rlhf_trainers.utils import resolve_reward_funcs
except ImportError as error:
    print(f"no ms-swift arguments: {error}")
    sys.exit()
from swift.rewards import orms
assert sys.argv[1] not in orms
arguments = BaseArguments.__new__(BaseArguments)
arguments.external_plugins, arguments.custom_register_path = ["plugin.py"], []
arguments._import_external_plugins()
(function,), (name,) = resolve_reward_funcs([sys.argv[1]])
assert name == orms[sys.argv[1]].__name__
columns = json.load(open("columns.json", encoding="utf-8"))
completions = [messages[-1]["content"] for messages in columns["messages"]]
rewards = function(completions, trainer_state=types.SimpleNamespace(global_step=int(sys.argv[2])), **columns)
print(json.dumps([total.hex() for total in (asyncio.run(rewards) if inspect.iscoroutine(rewards) else rewards)]))
"""
