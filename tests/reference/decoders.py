"""Tiny random Qwen2, Qwen3, Llama and Mistral checkpoints with their logits and gradients, in golden/decoders/<name>/; and with
log-probabilities of one row of 4,096 tokens, in golden/decoders/long-<name>/.

Weights are far from their usual initial values (norm weights not 1, biases not 0, attention not uniform), so that a missing norm, bias, head
group or rotation changes the logits by far more than rounding.
"""

import json
import shutil
import sys

from common import GOLDEN, generator, next_token_loss
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

BATCH, TOKENS, VOCAB = 2, 12, 64
PAD_ID = 0

SHARED = {
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": VOCAB,
}
QWEN = {"max_window_layers": 2, "use_sliding_window": False}
QWEN2 = QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 64}
QWEN3 = QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "sliding_window": None,
    "rope_scaling": None,
    "attention_bias": False,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False, "rope_scaling": None}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}

# name: (seed, config, number of valid tokens of each row)
VARIANTS = {
    "qwen2-tied": (
        11,
        QWEN2 | {"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True},
        (12, 12),
    ),
    "qwen2-untied": (
        12,
        QWEN2 | {"num_key_value_heads": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False},
        (12, 8),
    ),
    "qwen3-tied": (
        13,
        QWEN3
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
        },
        (12, 12),
    ),
    "qwen3-untied": (
        14,
        QWEN3
        | {
            "num_key_value_heads": 1,
            "head_dim": 12,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        (12, 5),
    ),
    "qwen3-bias": (
        15,
        QWEN3
        | {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
        (12, 9),
    ),
    "llama-bias": (
        16,
        LLAMA
        | {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
        (12, 7),
    ),
    # Of the 8 frequencies of a head, some are unscaled, some partly and some fully scaled.
    "llama3-scaled": (
        17,
        LLAMA
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 512,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": True,
            "attention_bias": False,
        },
        (12, 12),
    ),
    "mistral": (
        18,
        MISTRAL
        | {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
        },
        (12, 10),
    ),
}

# RoPE scaling under both keys and with both names of the type, sliding windows on all layers and on some.
NARROW = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
VARIANTS |= {
    # As in Qwen2.5's model card.
    "yarn-scaling": (
        21,
        QWEN2
        | NARROW
        | {
            "rope_theta": 1000.0,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 16, "type": "yarn"},
        },
        (12, 9),
    ),
    "yarn-parameters": (
        22,
        {key: value for key, value in (QWEN3 | NARROW).items() if key != "rope_scaling"}
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 3.0,
                "original_max_position_embeddings": 20,
                "beta_fast": 4.0,
                "beta_slow": 0.25,
                "mscale": 0.8,
                "mscale_all_dim": 0.3,
                "truncate": False,
            },
        },
        (12, 12),
    ),
    "yarn-attention-factor": (
        23,
        LLAMA
        | NARROW
        | {
            "rope_theta": 1000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.0,
                "attention_factor": 1.5,
                "original_max_position_embeddings": 32,
            },
        },
        (12, 12),
    ),
    "linear": (24, LLAMA | NARROW | {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 2.5}}, (12, 7)),
    "dynamic": (
        25,
        LLAMA | NARROW | {"rope_theta": 1000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        (12, 12),
    ),
    "window-mistral": (26, MISTRAL | NARROW | {"rope_theta": 1000.0, "sliding_window": 5}, (12, 10)),
    # Full attention on the first layer.
    "window-qwen2": (
        27,
        QWEN2
        | NARROW
        | {"rope_theta": 1000.0, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        (12, 12),
    ),
    "window-qwen3": (
        28,
        QWEN3
        | NARROW
        | {
            "rope_theta": 1000.0,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        (12, 8),
    ),
}

LONG_TOKENS = 4096
LONG = NARROW | {"max_position_embeddings": LONG_TOKENS}
# name: (seed, config)
LONG_VARIANTS = {
    "long-yarn": (
        31,
        QWEN2
        | LONG
        | {
            "rope_theta": 1000000.0,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 1024, "type": "yarn"},
        },
    ),
    "long-linear": (32, LLAMA | LONG | {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "long-dynamic": (33, LLAMA | LONG | {"rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "long-window-mistral": (34, MISTRAL | LONG | {"rope_theta": 10000.0, "sliding_window": 700}),
    "long-window-qwen3": (
        35,
        QWEN3
        | LONG
        | {"rope_theta": 1000000.0, "use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 1},
    ),
}


def randomise(model, rng):
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=rng)
        if name.endswith("norm.weight"):
            value = 1.0 + 0.3 * noise
        elif name.endswith(".bias"):
            value = 0.3 * noise
        elif name.endswith("embed_tokens.weight"):
            value = 0.4 * noise
        else:
            value = 1.2 * noise / parameter.shape[1] ** 0.5
        parameter.data.copy_(value)


def inputs(lengths, rng):
    """Token ids and mask. Row 0 contains the padding id as a normal token, so that a mask derived from ids is wrong."""
    input_ids = torch.randint(3, VOCAB, (BATCH, TOKENS), generator=rng)
    attention_mask = torch.tensor([[int(t < length) for t in range(TOKENS)] for length in lengths])
    input_ids[0, 4] = PAD_ID
    input_ids[attention_mask == 0] = PAD_ID
    return input_ids, attention_mask


def load(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def checkpoint(name, seed, overrides):
    """Writes a random checkpoint; returns the model as transformers loads it, and the generator."""
    directory = GOLDEN / "decoders" / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    # The configuration in the form of released checkpoints; transformers 5 writes another form, which is saved next to it.
    classic = json.dumps(dict(sorted((SHARED | overrides).items())), indent=2) + "\n"
    (directory / "config.json").write_text(classic)

    rng = generator(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    randomise(model, rng)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "config.json").rename(directory / "config.transformers-5.json")
    (directory / "config.json").write_text(classic)

    (directory / "model.safetensors").chmod(0o644)

    model = load(directory)
    rope_theta = overrides.get("rope_theta") or overrides["rope_parameters"]["rope_theta"]
    assert model.config.rope_parameters["rope_theta"] == rope_theta
    return directory, model, rng


def make(name, seed, overrides, lengths):
    directory, model, rng = checkpoint(name, seed, overrides)
    input_ids, attention_mask = inputs(lengths, rng)
    output = model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False)
    loss = next_token_loss(output.logits, input_ids, attention_mask)
    loss.backward()

    golden = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "logits": output.logits,
        "last_hidden_state": output.hidden_states[-1],  # after the final norm
        "loss": loss.reshape(1),
    }
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, parameter_name
        golden[f"grad.{parameter_name}"] = parameter.grad
    save_file({k: v.detach().contiguous() for k, v in golden.items()}, directory / "golden.safetensors")
    (directory / "golden.safetensors").chmod(0o644)
    print(f"decoders/{name}: loss {loss.item():.6f}, logits std {output.logits.std().item():.3f}")


def make_long(name, seed, overrides):
    """One row of 4,096 tokens: log-probabilities of the next token at some positions, including the last ones."""
    directory, model, rng = checkpoint(name, seed, overrides)
    input_ids = torch.randint(3, VOCAB, (1, LONG_TOKENS), generator=rng)
    positions = torch.tensor(sorted({*range(0, LONG_TOKENS - 1, 61), *range(LONG_TOKENS - 33, LONG_TOKENS - 1)}))
    with torch.no_grad():
        logits = model(input_ids=input_ids, use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits[positions], -1)
    golden = {
        "input_ids": input_ids[0].to(torch.uint8),
        "positions": positions,
        "logprobs": logprobs.gather(1, input_ids[0, positions + 1, None])[:, 0],
    }
    save_file({k: v.detach().contiguous() for k, v in golden.items()}, directory / "golden.safetensors")
    (directory / "golden.safetensors").chmod(0o644)
    print(f"decoders/{name}: mean log-probability {golden['logprobs'].mean().item():.6f}")


if __name__ == "__main__":
    for name in sys.argv[1:] or [*VARIANTS, *LONG_VARIANTS]:  # decoders.py [NAME...]
        if name in LONG_VARIANTS:
            make_long(name, *LONG_VARIANTS[name])
        else:
            make(name, *VARIANTS[name])
