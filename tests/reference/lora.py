"""PEFT LoRA adapters on the tied checkpoints of decoders.py, with logits and gradients, in golden/lora/<name>/.

Both A and B are random: with PEFT's initial B of zeros the gradient of A would vanish and the scale would not show.
"""

import json
import shutil

from common import GOLDEN, generator, next_token_loss
import torch
from decoders import TOKENS, inputs, load
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file

RANK, ALPHA = 4, 8
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# name: (base checkpoint, seed, use_rslora)
VARIANTS = {
    "qwen2-tied": ("qwen2-tied", 21, False),
    "qwen2-tied-rslora": ("qwen2-tied", 21, True),
    "qwen3-tied": ("qwen3-tied", 22, False),
    "qwen3-tied-rslora": ("qwen3-tied", 22, True),
}


def saved_key(name):
    """`...lora_A.default.weight` in memory is `...lora_A.weight` in the file: the adapter's name is dropped."""
    return name.replace(".default.", ".")


def tidy_config(path, base_name):
    """The base by name instead of by path, and lists in a fixed order (PEFT writes a set)."""
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = base_name
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make(name, base_name, seed, use_rslora):
    directory = GOLDEN / "lora" / name
    shutil.rmtree(directory, ignore_errors=True)
    base_directory = GOLDEN / "decoders" / base_name
    rng = generator(seed)

    config = LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias="none",
        target_modules=LINEARS, use_rslora=use_rslora,
    )
    model = get_peft_model(load(base_directory), config)
    for _, parameter in sorted((n, p) for n, p in model.named_parameters() if "lora_" in n):
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=rng))
    model.save_pretrained(directory, save_embedding_layers=False)
    (directory / "README.md").unlink(missing_ok=True)
    tidy_config(directory / "adapter_config.json", base_name)

    model = PeftModel.from_pretrained(load(base_directory), directory, is_trainable=True).eval()
    input_ids, attention_mask = inputs((TOKENS, TOKENS), rng)
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    loss = next_token_loss(logits, input_ids, attention_mask)
    loss.backward()

    golden = {"input_ids": input_ids, "attention_mask": attention_mask, "logits": logits, "loss": loss.reshape(1)}
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.abs().max() > 0, parameter_name
            golden[f"grad.{saved_key(parameter_name)}"] = parameter.grad
    with safe_open(directory / "adapter_model.safetensors", "pt") as adapter:
        assert {f"grad.{key}" for key in adapter.keys()} == {key for key in golden if key.startswith("grad.")}
    save_file({k: v.detach().contiguous() for k, v in golden.items()}, directory / "golden.safetensors")
    (directory / "adapter_model.safetensors").chmod(0o644)
    (directory / "golden.safetensors").chmod(0o644)
    print(f"lora/{name}: loss {loss.item():.6f}")


if __name__ == "__main__":
    for name, variant in VARIANTS.items():
        make(name, *variant)
