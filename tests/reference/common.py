"""Shared by the scripts of this folder: the folder of the goldens, the seed, and the loss of every model golden."""

import json
import os
import re
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.nn.functional as F

GOLDEN = Path(__file__).resolve().parent / "golden"

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


def generator(seed):
    """A separate generator for each golden, so that an additional golden does not change the others."""
    return torch.Generator().manual_seed(seed)


def next_token_loss(logits, input_ids, attention_mask):
    """Mean cross-entropy of token t+1 given the tokens up to t, over the targets that `attention_mask` keeps."""
    targets = input_ids[:, 1:]  # (B, T-1)
    kept = attention_mask[:, 1:].bool()  # (B, T-1)
    return F.cross_entropy(logits[:, :-1][kept], targets[kept])


def rounded(value):
    """Tensors and floats as nested lists with 9 significant digits, which represent a float32 exactly."""
    if isinstance(value, torch.Tensor):
        return rounded(value.detach().tolist())
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return value


def write_json(path, value):
    """Readable JSON: one line for each innermost list."""
    text = json.dumps(rounded(value), indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(r"\[[^\[\]{}\"]*\]", lambda found: " ".join(found.group().split()), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
