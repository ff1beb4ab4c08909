"""verl's `core_algos` and `torch_functional`, imported from the installed package without its cluster dependencies.

`import verl` imports ray and other packages that the formulas do not use. The modules in `ABSENT` are replaced by empty ones, and
`verl/__init__.py` is skipped; every called formula is that of the installed file. The reward manager of DAPO, whose module needs more of ray,
is compiled from its source.
"""

import ast
import asyncio
import importlib.util
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import common  # noqa: F401  (sets the environment before torch is loaded)

ABSENT = ["ray"]


def _import():
    root = Path(importlib.util.find_spec("torch").origin).parents[1] / "verl"
    package = types.ModuleType("verl")
    package.__path__ = [str(root)]
    package.__version__ = (root / "version" / "version").read_text().strip()
    sys.modules["verl"] = package
    for name in ABSENT:
        sys.modules[name] = MagicMock(name=name, __spec__=None)
    import verl.trainer.ppo.core_algos as core_algos
    import verl.trainer.ppo.rollout_corr_helper as rollout_corr_helper
    import verl.utils.torch_functional as torch_functional

    return core_algos, rollout_corr_helper, torch_functional, package.__version__


core_algos, rollout_corr_helper, torch_functional, VERSION = _import()


def _dapo_run_single():
    """`DAPORewardManager.run_single` as a function of the manager and its data."""
    root = Path(sys.modules["verl"].__path__[0])
    path = root / "experimental" / "reward_loop" / "reward_manager" / "dapo.py"
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    (method,) = [node for node in classes[0].body if getattr(node, "name", "") == "run_single"]
    method.args.args[1].annotation = None  # a class that is not imported here
    namespace = {}
    exec(compile(ast.Module([method], []), str(path), "exec"), namespace)
    return namespace["run_single"]


def dapo_overlong_reward(n_tokens, max_resp_len, buffer_len, penalty_factor):
    """verl's `overlong_reward` of a response of `n_tokens` tokens whose score is 0."""
    import torch

    length = max_resp_len + 3  # with padding
    mask = torch.cat([torch.ones(2 + n_tokens), torch.zeros(length - n_tokens)]).long()
    fields = {"data_source": "", "reward_model": {"ground_truth": ""}}
    item = types.SimpleNamespace(
        batch={"responses": torch.zeros(length), "attention_mask": mask}, non_tensor_batch=fields
    )

    async def score(**_):
        return 0.0

    async def run():
        manager = types.SimpleNamespace(
            loop=asyncio.get_running_loop(), tokenizer=types.SimpleNamespace(decode=lambda *_, **__: ""),
            compute_score=score, is_async_reward_score=True, reward_router_address=None, max_resp_len=max_resp_len,
            overlong_buffer_cfg=types.SimpleNamespace(
                enable=True, len=buffer_len, penalty_factor=penalty_factor, log=True
            ),
        )  # fmt: skip
        return await dapo_run_single(manager, [item])

    return float(asyncio.run(run())["reward_score"])


dapo_run_single = _dapo_run_single()
