"""The output of `querl export verl` in `verl.trainer.main_ppo` without GPUs: configuration, datasets, reward, roles, and where it stops."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Sample

querl = pytest.importorskip("querl")
pytest.importorskip("hydra")
pytest.importorskip("transfer_queue", reason="verl's trainer needs TransferQueue: setup.sh")
pytest.importorskip("verl.trainer.ppo.v1", exc_type=ImportError)
import verl_cluster as on_ray  # noqa: E402

#: With `rollout.name=vllm` verl checks the LoRA rank in vLLM's code, which needs CUDA. No other setting changes.
WITHOUT_VLLM = "actor_rollout_ref.rollout.name=sglang"


@pytest.fixture(scope="module")
def config(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from omegaconf import OmegaConf

    settings = on_ray.settings(exported, tmp_path_factory.mktemp("settings"))
    composed = on_ray.compose([*settings, *on_ray.SMALL, WITHOUT_VLLM])
    OmegaConf.resolve(composed)
    return composed


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from verl.utils import hf_tokenizer

    return hf_tokenizer(str(ROOT / "examples/tiny-qwen3"))


def written_rows(run: Path, split: str) -> dict[str, dict[str, Any]]:
    """Rows of the run, by id."""
    lines = (run / "data" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["metadata"]["id"]: row for row in map(json.loads, lines)}


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_dataset_of_verl_reads_the_exported_rows(split: str, run: Path, config: Any, tokenizer: Any) -> None:
    from verl.trainer.ppo.utils import create_rl_dataset
    from verl.utils.tokenizer import normalize_token_ids

    dataset = create_rl_dataset(config.data[f"{split}_files"], config.data, tokenizer, None, is_train=split == "train")
    expected = written_rows(run, split)
    # No row is dropped for its length: `data.max_prompt_length` is the limit of the run.
    assert len(dataset) == len(expected)
    for index in range(len(dataset)):
        row = dataset[index]
        written = expected[row["reward_model"]["ground_truth"]]
        assert row["raw_prompt"] == [message for message in written["messages"] if message["role"] != "assistant"]
        label = json.loads(row["extra_info"]["querl"])
        assert label["query"] == written["metadata"]["original_query"] and row["extra_info"]["split"] == split
        assert row["data_source"] == "fivedoctors" and row["index"] == row["extra_info"]["index"] == index
    tokens = normalize_token_ids(tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, tokenize=True))
    assert row["raw_prompt"][-1]["content"] in tokenizer.decode(tokens) and len(tokens) <= config.data.max_prompt_length


def test_the_configuration_is_valid_for_verl(config: Any) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    # [rl] of the run is PPO with the KL divergence in the reward.
    assert need_critic(config) and need_reference_policy(config)
    validate_config(config, use_reference_policy=True, use_critic=True)


def test_the_reward_of_the_configuration_is_loaded(config: Any, tokenizer: Any, samples: list[Sample], scorer: Any) -> None:
    """The reward of the exported configuration, loaded by the path `pkg://querl.integrations.verl`."""
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.trainer.ppo.utils import create_rl_dataset

    row = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)[0]
    (expected,) = scorer.score([{"query": row["reward_model"]["ground_truth"], "response": samples[1].response}])

    async def scored() -> Any:
        # In an event loop, as in a worker.
        return await load_reward_manager(config, tokenizer).run_single(on_ray.trajectory(tokenizer, row, samples[1].response))

    found = asyncio.run(scored())
    assert found["reward_score"] == expected.total
    assert found["reward_extra_info"] == {
        "score": expected.total,
        **{f"querl/{name}": value for name, value in expected.components.items()},
    }


def test_roles_and_dataloaders_of_the_trainer(config: Any) -> None:
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import Role
    from verl.trainer.ppo.v1 import get_trainer_cls

    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=OmegaConf.create(OmegaConf.to_container(config)))
    trainer._init_tokenizer()
    trainer._init_dataloader()
    # 4 queries per step (`rl.batch_size`), two steps (`rl.max_steps`).
    assert len(trainer.train_dataloader) == len(trainer.train_dataset) // 4 and trainer.total_training_steps == 2
    assert len(next(iter(trainer.train_dataloader))["raw_prompt"]) == 4
    trainer._init_resource_pool_mgr()
    # With LoRA the reference is the actor with its adapter disabled, so that it has no separate role.
    assert set(trainer.role_worker_mapping) == {Role.ActorRollout, Role.Critic}


def test_main_ppo_stops_where_it_asks_for_gpus(exported: Path, tmp_path: Path) -> None:
    """`train.sh` itself stops at the first use of a GPU; docs/engines.md says how to continue on a machine with GPUs."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    program = tmp_path / "bin" / "python3"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}

    def stopped(*arguments: str) -> str:
        command = ["bash", str(exported / "train.sh"), f"hydra.run.dir={tmp_path}", *arguments]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=on_ray.TIMEOUT_S)
        assert ended.returncode != 0
        return ended.stdout + ended.stderr

    if importlib.util.find_spec("vllm") is None:
        assert "ValueError: vllm version None not supported" in stopped()
    output = stopped(*on_ray.SMALL, WITHOUT_VLLM, f"ray_kwargs.ray_init.num_cpus={on_ray.N_CPUS}")
    reached = ["All configuration checks passed successfully!", "Started a local Ray instance", "dataset len: 336", "dataset len: 112"]
    assert [text for text in reached if text not in output] == []
    assert "create_resource_pool" in output and "ValueError: Total available GPUs 0 is less than total desired GPUs 2" in output
