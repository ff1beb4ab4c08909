"""TRL's functions and methods, compiled from the installed sources without importing the package.

Two releases are installed in addition to the environment's packages (`setup.sh`): 0.11.4, whose `PPOTrainer` has its formulas in separate
methods, and 0.24.0 for GRPO. Importing them would need the transformers version for which they were made. Therefore only the called definitions
are compiled, with the names that they use.
"""

import __future__
import ast
from pathlib import Path

import common  # noqa: F401  (sets the environment before torch is loaded)
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent / ".venv"
OLD, NEW = "0.11.4", "0.24.0"


def definitions(version, file, names, namespace):
    """Compiles the functions and classes called `names` (`Class.method` for one method) of a source file."""
    path = ROOT / f"trl-{version}" / "trl" / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}": inner for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
    flags = __future__.annotations.compiler_flag
    for name in names:
        node = found[name]
        node.decorator_list = [d for d in node.decorator_list if getattr(d, "id", "") == "dataclass"]
        exec(compile(ast.Module([node], []), str(path), "exec", flags), namespace)
    return namespace


def _old():
    from collections.abc import Mapping
    from dataclasses import dataclass

    namespace = {"torch": torch, "np": np, "F": torch.nn.functional, "dataclass": dataclass, "Mapping": Mapping}
    core = ["flatten_dict", "masked_mean", "masked_var", "masked_whiten", "clip_by_value", "entropy_from_logits"]
    definitions(OLD, "core.py", core, namespace)
    definitions(OLD, "trainer/utils.py", ["AdaptiveKLController", "RunningMoments"], namespace)
    methods = ["compute_rewards", "_kl_penalty", "compute_advantages", "loss"]
    return definitions(OLD, "trainer/ppo_trainer.py", [f"PPOTrainer.{name}" for name in methods], namespace)


def _new():
    namespace = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}
    return definitions(NEW, "trainer/grpo_trainer.py", ["GRPOTrainer._compute_loss"], namespace)


old, new = _old(), _new()
