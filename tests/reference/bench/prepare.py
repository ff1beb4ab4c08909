"""Makes the inputs of both sides in work/: models with seeded random weights, PEFT's initial adapters, token ids.

    python prepare.py [--querl ../../../target/release/querl] [--shapes S M]

Token ids are those of examples/fivedoctors with the tokenizer and chat template of examples/tiny-qwen3, which are below every shape's
vocabulary size. Prompts of the rollouts are random: 128 ids, the first 96 equal in all.
"""

import argparse
import json
import shutil
import subprocess
from pathlib import Path

from common import WORK
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

REPOSITORY = Path(__file__).resolve().parents[3]
TINY = REPOSITORY / "examples/tiny-qwen3"
COMMON = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# name: (configuration, stored type). S is the small shape; M has Qwen2.5-0.5B's configuration; the others are for scaling with model size.
SHAPES = {
    "S": ({"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
           "intermediate_size": 688, "vocab_size": 4096}, torch.float32),
    "S2": ({"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
            "intermediate_size": 1376, "vocab_size": 4096}, torch.float32),
    "S3": ({"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
            "intermediate_size": 1376, "vocab_size": 4096}, torch.float32),
    "S4": ({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 2,
            "intermediate_size": 2064, "vocab_size": 4096}, torch.float32),
    "M": ({"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
           "intermediate_size": 4864, "vocab_size": 151936}, torch.bfloat16),
}
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
N_SHARED = 96


def make_model(name):
    directory = WORK / name
    if (directory / "adapter/adapter_model.safetensors").is_file():
        return
    torch.manual_seed(0)
    shape, dtype = SHAPES[name]
    config = Qwen2Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **COMMON, **shape)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(TINY / file, directory / file)
    # B is zero, as in PEFT's initialisation: the adapter has no effect before the first step.
    adapter = get_peft_model(model.float(), LoraConfig(**LORA))
    adapter.save_pretrained(directory / "adapter")


def tokenised(path, tokenizer):
    """Rows with a response: the prompt in the chat template, the response and the end of its turn."""
    for line in path.read_text(encoding="utf-8").splitlines():
        *prompt, answer = json.loads(line)["messages"]
        if answer["role"] != "assistant":
            continue
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        response = tokenizer(answer["content"], add_special_tokens=False)["input_ids"]
        yield {"prompt": ids, "response": [*response, tokenizer.eos_token_id]}


def make_rows(querl):
    """The splits of the example, made by querl."""
    target = WORK / "fivedoctors.json"
    if target.is_file():
        return
    run = WORK / "run"
    command = [querl, "run", "examples/fivedoctors/querl.toml", "--to", "convert", "--out", str(run)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    splits = {split: list(tokenised(run / f"data/{split}.jsonl", tokenizer)) for split in ("train", "val")}
    target.write_text(json.dumps(splits))


def random_prompts(n_prompts, n_tokens, n_shared, vocab_size=4096, seed=1):
    """Prompts of random ids with a common prefix and without special tokens."""
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, min(vocab_size, 2400), (n_shared,), generator=draw).tolist()
    own = torch.randint(3, min(vocab_size, 2400), (n_prompts, n_tokens - n_shared), generator=draw).tolist()
    return [shared + row for row in own]


def make_prompts():
    (WORK / "prompts.json").write_text(json.dumps({"train": random_prompts(32, 128, N_SHARED)}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--querl", default=str(REPOSITORY / "target/release/querl"))
    parser.add_argument("--shapes", nargs="+", default=["S", "M"], choices=SHAPES)
    settings = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    make_rows(settings.querl)
    make_prompts()
    for name in settings.shapes:
        make_model(name)


if __name__ == "__main__":
    main()
