"""verl on this machine: the configuration of an exported folder, a Ray cluster of two nodes, samples as created by verl's agent loop."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import Sample

#: Logical CPUs per node. verl requests ten per GPU, and its TransferQueue one per storage unit.
N_CPUS = 16
#: Worker processes import torch and verl, which takes minutes on busy cores.
TIMEOUT_S = 480.0
#: Changes of the exported settings for a machine without GPUs and with few cores.
SMALL = [
    "reward.num_workers=2",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "data.dataloader_num_workers=0",
    "data.max_response_length=64",
    # One response per prompt: the tests supply the responses.
    "actor_rollout_ref.rollout.n=1",
]


def settings(folder: Path, tmp_path: Path) -> list[str]:
    """The arguments with which `train.sh` of an exported folder starts verl, after expansion by the shell."""
    program = tmp_path / "bin" / "python3"
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    printed = subprocess.run(["bash", str(folder / "train.sh")], env=environment, capture_output=True, text=True, check=True).stdout
    first, module, *arguments = printed.splitlines()
    assert (first, module) == ("-m", "verl.trainer.main_ppo")
    return arguments


def compose(overrides: list[str]) -> Any:
    """The configuration of `verl.trainer.main_ppo`, composed by hydra."""
    import hydra
    import verl

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return hydra.compose("ppo_trainer", overrides=overrides)


def free_ports(n_ports: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n_ports)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def node_arguments() -> dict[str, Any]:
    # With preset ports a node does not wait for the start of its agents, which exceeds Ray's timeout on a busy machine.
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    return {"num_cpus": N_CPUS, "object_store_memory": 80_000_000, **dict(zip(names, free_ports(len(names)), strict=True))}


@contextlib.contextmanager
def two_nodes() -> Iterator[Any]:
    """A Ray cluster of two nodes on this machine, to which this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **node_arguments()})
    try:
        cluster.add_node(**node_arguments())
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def process_and_node(worker: Any) -> tuple[int, str]:
    """Process id and node id of an actor."""
    import ray

    def found(_: Any) -> tuple[int, str]:
        return os.getpid(), ray.get_runtime_context().get_node_id()

    return tuple(ray.get(worker.__ray_call__.remote(found), timeout=TIMEOUT_S))


def wait_until(condition: Any, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not after {timeout_s} s"
        time.sleep(0.2)


def trajectory(tokenizer: Any, row: dict[str, Any], response: str) -> Any:
    """A response to a row of the exported dataset, as passed on by verl/experimental/agent_loop/agent_loop.py (`_compute_score`)."""
    import numpy
    import tensordict
    import torch
    from verl.protocol import DataProto

    prompts = torch.ones((1, 4), dtype=torch.int64)
    responses = torch.tensor([[*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]])
    mask = torch.ones((1, 4 + responses.shape[1]), dtype=torch.int64)
    batch = tensordict.TensorDict({"prompts": prompts, "responses": responses, "attention_mask": mask}, batch_size=1)
    names = ("data_source", "reward_model", "extra_info", "raw_prompt")
    columns = {name: numpy.array([row[name]]) for name in names}
    columns |= {"__num_turns__": numpy.array([2]), "tool_extra_fields": numpy.array([{}], dtype=object)}
    return DataProto(batch=batch, non_tensor_batch=columns)


class Answers:
    """Replaces the client of the rollout servers: selects the response by the prompt's text, so that its reward is known."""

    def __init__(self, tokenizer: Any, by_prompt: dict[tuple[int, ...], str]) -> None:
        self.tokenizer, self.by_prompt = tokenizer, by_prompt

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        response = self.by_prompt[tuple(prompt_ids)]
        tokens = [*self.tokenizer.encode(response, add_special_tokens=False), self.tokenizer.eos_token_id]
        # Weight versions, as reported by the servers.
        return TokenOutput(token_ids=tokens, stop_reason="completed", extra_fields={"min_global_steps": 1, "max_global_steps": 1})


def responses_of(rows: list[dict[str, Any]], samples: list[Sample]) -> list[str]:
    """A response for each row: the samples' responses in turn."""
    return [samples[index % len(samples)].response for index in range(len(rows))]
