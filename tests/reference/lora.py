"""PEFT LoRA adapters on the checkpoints of decoders.py, with logits and gradients, in golden/lora/<name>/.

All trained tensors are random: with PEFT's initial B of zeros the gradient of A would be 0 and the scale would have no effect; with its initial
magnitudes and copies a program that ignores them would be correct.
"""

import json
import shutil
import warnings

from common import GOLDEN, generator, next_token_loss
from dropout import use_masks
import torch
from decoders import TOKENS, inputs, load
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

# PEFT warns about tied weights and saved embeddings, which these goldens test.
warnings.filterwarnings("ignore", category=UserWarning, module="peft")

RANK, ALPHA = 4, 8
HEAD_LORA = "base_model.model.lm_head.lora"
EMBEDDING_LORA = "base_model.model.model.embed_tokens.lora_embedding"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# name: (base checkpoint, seed, differences from plain LoRA on all linear layers)
VARIANTS = {
    "qwen2-tied": ("qwen2-tied", 21, {}),
    "qwen2-tied-rslora": ("qwen2-tied", 21, {"use_rslora": True}),
    "qwen3-tied": ("qwen3-tied", 22, {}),
    "qwen3-tied-rslora": ("qwen3-tied", 22, {"use_rslora": True}),
    "qwen2-untied-dora": ("qwen2-untied", 23, {"use_dora": True}),
    "qwen3-tied-dora-rslora": ("qwen3-tied", 24, {"use_dora": True, "use_rslora": True}),
    # The first matching pattern counts; PEFT uses the order of the file. A regular expression selects the layers.
    "qwen3-untied-patterns": (
        "qwen3-untied",
        25,
        {
            "target_modules": r".*layers\.\d\.(self_attn\.(?!o)[a-z]_proj|mlp\.(up|down)_proj)",
            "exclude_modules": r".*layers\.1\.mlp\.up_proj",
            "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 2, "q_proj": 6, "down_proj": 3},
            "alpha_pattern": {r"layers\.1\..*": 3, "v_proj": 5},
            "use_rslora": True,
        },
    ),
    "qwen2-tied-layers": (
        "qwen2-tied",
        26,
        {"target_modules": ["self_attn.q_proj", "down_proj"], "layers_to_transform": [1]},
    ),
    # Tied embeddings: one copy of the embedding, two separate copies, one copy for both.
    "qwen3-tied-embedding": ("qwen3-tied", 27, {"modules_to_save": ["embed_tokens"]}),
    "qwen2-tied-copies": ("qwen2-tied", 28, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "qwen2-tied-copy": ("qwen2-tied", 29, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    # LoRA on the embedding: the tied head has the same matrices, transposed.
    "qwen2-tied-pair": ("qwen2-tied", 36, {"target_modules": ["v_proj", "embed_tokens"], "ensure_weight_tying": True}),
    "qwen3-untied-head": ("qwen3-untied", 30, {"modules_to_save": ["lm_head"], "use_dora": True}),
    # LoRA on embedding and head.
    "qwen2-untied-ends": ("qwen2-untied", 31, {"target_modules": ["v_proj", "embed_tokens", "lm_head"]}),
    # With querl's dropout masks in place of PEFT's (dropout.py).
    "qwen3-tied-dropout": ("qwen3-tied", 34, {"lora_dropout": 0.25}),
    "qwen2-untied-dora-dropout": ("qwen2-untied", 35, {"lora_dropout": 0.25, "use_dora": True}),
    "qwen3-tied-bf16": ("qwen3-tied", 32, {}),
    "qwen2-tied-f16": ("qwen2-tied", 33, {}),
}

# Type of the tensors in the file, if not float32.
DTYPES = {"qwen3-tied-bf16": torch.bfloat16, "qwen2-tied-f16": torch.float16}


def saved_key(name):
    """`...lora_A.default.weight` in memory is `...lora_A.weight` in the file, without the adapter's name."""
    name = name.replace(".modules_to_save.default.", ".").replace("_vector.default.weight", "_vector")
    return name.replace(".default.", ".").removesuffix(".default")


def tidy_config(path, base_name):
    """Replaces the base's path by its name, and sorts lists, because PEFT writes sets."""
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = base_name
    for key in ("target_modules", "modules_to_save"):
        if isinstance(config[key], list):
            config[key] = sorted(config[key])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def randomise(model, rng):
    for name, parameter in sorted((n, p) for n, p in model.named_parameters() if p.requires_grad):
        noise = torch.randn(parameter.shape, generator=rng)
        if "magnitude" in name:
            parameter.data.mul_(1 + 0.3 * noise)
        elif "modules_to_save" in name:
            parameter.data.add_(0.2 * noise)
        else:
            parameter.data.copy_(0.3 * noise)


def make(name, base_name, seed, overrides):
    directory = GOLDEN / "lora" / name
    shutil.rmtree(directory, ignore_errors=True)
    base_directory = GOLDEN / "decoders" / base_name
    rng = generator(seed)

    settings = {"r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "target_modules": LINEARS}
    config = LoraConfig(task_type="CAUSAL_LM", **(settings | overrides))
    model = get_peft_model(load(base_directory), config)
    randomise(model, rng)
    ends = "embed_tokens" in config.target_modules
    model.save_pretrained(directory, save_embedding_layers=ends)
    (directory / "README.md").unlink(missing_ok=True)
    tidy_config(directory / "adapter_config.json", base_name)
    file = directory / "adapter_model.safetensors"
    if name in DTYPES:
        tensors = {key: tensor.to(DTYPES[name]) for key, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})

    model = PeftModel.from_pretrained(load(base_directory), directory, is_trainable=True).eval()
    input_ids, attention_mask = inputs((TOKENS, TOKENS), rng)
    if config.lora_dropout:
        use_masks(model, config.lora_dropout, seed, input_ids)
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    loss = next_token_loss(logits, input_ids, attention_mask)
    loss.backward()

    golden = {"input_ids": input_ids, "attention_mask": attention_mask, "logits": logits, "loss": loss.reshape(1)}
    if config.lora_dropout:
        golden["dropout_seed"] = torch.tensor([seed])
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.abs().max() > 0, parameter_name
            golden[f"grad.{saved_key(parameter_name)}"] = parameter.grad
    if f"grad.{HEAD_LORA}_A.weight" in golden and config.ensure_weight_tying:
        # PEFT computes the gradients of embedding and head separately, although they share their matrices.
        for own, source in (("A", "B"), ("B", "A")):
            gradient = golden.pop(f"grad.{HEAD_LORA}_{own}.weight").t()
            key = f"grad.{EMBEDDING_LORA}_{source}"
            golden[key] = golden[key] + gradient
    with safe_open(file, "pt") as adapter:
        untrained = {key for key in adapter.keys() if ".base_layer." in key}
        if config.ensure_weight_tying:
            untrained |= {key for key in adapter.keys() if key.startswith("base_model.model.lm_head.")}
        trained = {f"grad.{key}" for key in set(adapter.keys()) - untrained}
        assert trained == {key for key in golden if key.startswith("grad.")}
    save_file({k: v.detach().contiguous() for k, v in golden.items()}, directory / "golden.safetensors")
    file.chmod(0o644)
    (directory / "golden.safetensors").chmod(0o644)
    print(f"lora/{name}: loss {loss.item():.6f}")


if __name__ == "__main__":
    for name, variant in VARIANTS.items():
        make(name, *variant)
