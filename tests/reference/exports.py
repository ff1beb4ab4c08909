"""Outputs of `querl model merge` and `querl model export` in transformers and PEFT: equal logits, complete folders.

Usage: exports.py QUERL MODEL_DIR

QUERL is the built command, MODEL_DIR a model with tokenizer and chat template (examples/tiny-qwen3). PEFT makes an adapter of each kind on it
with random values. For each kind, querl's log-probabilities with the adapter, the model merged by querl, and the adapter rewritten by querl are
compared with PEFT's unmerged model. Exits with 1 if anything differs.
"""

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from common import generator
import torch
from lora import LINEARS, randomise
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()
warnings.filterwarnings("ignore", category=UserWarning, module="peft")

LOGITS = 1e-5  # relative to the largest logit
LOGPROBS = 1e-4
LINES = ["深海鱼油一天吃几粒", "<|im_start|>user\n维生素D和钙可以一起吃吗<|im_end|>\n<|im_start|>assistant\n"]

# name: differences from plain LoRA on all linear layers
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {
        "target_modules": r".*layers\.\d\.(self_attn\.[qv]_proj|mlp\.(up|down)_proj)",
        "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 2, "down_proj": 12},
        "alpha_pattern": {"v_proj": 5},
    },
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "copies": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "copy": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "ends": {"target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    "pair": {"target_modules": ["v_proj", "embed_tokens"], "ensure_weight_tying": True},
}


def run(*command):
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


def base(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def logits(model, tokens):
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0] for ids in tokens]


def worst(found, expected):
    """Largest difference relative to the largest expected value."""
    scale = max(tensor.abs().max().item() for tensor in expected)
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)) / scale


def make_adapter(model_dir, seed, overrides, directory):
    settings = {"r": 8, "lora_alpha": 16, "target_modules": LINEARS} | overrides
    model = get_peft_model(base(model_dir), LoraConfig(task_type="CAUSAL_LM", **settings))
    rng = generator(seed)
    randomise(model, rng)
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
            parameter.data.mul_(0.3)  # keeps the logits at a usual size
    model.save_pretrained(directory, save_embedding_layers="embed_tokens" in settings["target_modules"])


def check_folder(directory, source, dtype):
    """Checks what transformers and vLLM need in a folder: each weight once, types, tokenizer, template, generation settings."""
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] and config["model_type"] and config["dtype"] == dtype, config
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    stored = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(directory / file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            stored |= {key: file for key in shard.keys()}
    assert stored == index["weight_map"]
    assert sorted(path.name for path in directory.glob("*.safetensors")) == sorted(set(stored.values()))
    assert len(set(stored.values())) > 1
    ours, theirs = AutoTokenizer.from_pretrained(directory), AutoTokenizer.from_pretrained(source)
    messages = [{"role": "user", "content": LINES[0]}]
    for line in LINES:
        assert ours(line)["input_ids"] == theirs(line)["input_ids"]
    rendered = [t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for t in (ours, theirs)]
    assert rendered[0] == rendered[1]
    assert GenerationConfig.from_pretrained(directory).to_dict() == GenerationConfig.from_pretrained(source).to_dict()


def check_logprobs(querl, model_dir, adapter_dir, tokens, expected, work):
    lines = work / "lines.jsonl"
    lines.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in tokens))
    found = run(querl, "model", "logprobs", "--model", model_dir, "--adapter", adapter_dir, "--input", lines)
    difference = 0.0
    for line, ids, rows in zip(found.splitlines(), tokens, expected, strict=True):
        reference = rows[:-1].log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
        difference = max(difference, (torch.tensor(json.loads(line)["logprobs"][1:]) - reference).abs().max().item())
    return difference


def check_kind(querl, model_dir, kind, seed, work):
    adapter, merged, again = work / "adapter", work / "merged", work / "again"
    make_adapter(model_dir, seed, KINDS[kind], adapter)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokens = [tokenizer(line)["input_ids"] for line in LINES]
    expected = logits(PeftModel.from_pretrained(base(model_dir), adapter).eval(), tokens)
    changed = worst(logits(base(model_dir), tokens), expected)

    arguments = ["--model", model_dir, "--adapter", adapter]
    run(querl, "model", "merge", *arguments, "--out", merged, "--dtype", "f32", "--max-shard-size", "2MB")
    check_folder(merged, model_dir, "float32")
    model = AutoModelForCausalLM.from_pretrained(merged, dtype="auto").eval()
    assert model.dtype == torch.float32
    on_merged = worst(logits(model, tokens), expected)

    run(querl, "model", "export", *arguments, "--out", again)
    rewritten = worst(logits(PeftModel.from_pretrained(base(model_dir), again).eval(), tokens), expected)
    logprobs = check_logprobs(querl, model_dir, adapter, tokens, expected, work)
    print(
        f"{kind}: of the largest logit {on_merged:.1e} merged, {rewritten:.1e} written again ({changed:.1e} by the adapter); "
        f"log-probabilities {logprobs:.1e}"
    )
    return changed > 1e-2 and on_merged <= LOGITS and rewritten <= LOGITS and logprobs <= LOGPROBS


def check_types(querl, model_dir, work):
    """A model and an adapter converted to another type contain exactly the rounded values."""
    for name, dtype in {"f16": torch.float16, "bf16": torch.bfloat16}.items():
        out = work / name
        run(querl, "model", "export", "--model", model_dir, "--out", out, "--dtype", name, "--max-shard-size", "1MB")
        check_folder(out, model_dir, str(dtype).removeprefix("torch."))
        found = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
        expected = base(model_dir).to(dtype)
        assert found.dtype == dtype
        for (key, a), (_, b) in zip(found.state_dict().items(), expected.state_dict().items(), strict=True):
            assert torch.equal(a, b), key
    adapter, out = work / "adapter", work / "adapter-bf16"
    make_adapter(model_dir, 7, {}, adapter)
    arguments = ["--model", model_dir, "--adapter", adapter, "--out", out, "--dtype", "bf16"]
    said = json.loads(run(querl, "model", "export", *arguments, "--json"))
    assert said["dtype"] == "bfloat16"
    with safe_open(adapter / "adapter_model.safetensors", "pt") as a, safe_open(out / "adapter_model.safetensors", "pt") as b:
        assert set(a.keys()) == set(b.keys())
        for key in a.keys():
            assert torch.equal(a.get_tensor(key).bfloat16(), b.get_tensor(key)), key
    ours, theirs = (json.loads((path / "adapter_config.json").read_text()) for path in (out, adapter))
    for key in set(theirs) - {"base_model_name_or_path", "target_modules"}:
        assert ours[key] == theirs[key], key
    assert sorted(ours["target_modules"]) == sorted(theirs["target_modules"])
    print("types: float16 and bfloat16 as torch rounds them")


def main(querl, model_dir):
    failed = []
    for seed, kind in enumerate(KINDS):
        with tempfile.TemporaryDirectory() as work:
            if not check_kind(querl, model_dir, kind, 100 + seed, Path(work)):
                failed.append(kind)
    with tempfile.TemporaryDirectory() as work:
        check_types(querl, model_dir, Path(work))
    if failed:
        sys.exit(f"differ: {', '.join(failed)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
