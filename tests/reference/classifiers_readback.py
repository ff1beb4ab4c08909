"""Classifiers written by `querl style train` have equal probabilities in transformers and PEFT.

Usage: classifiers_readback.py QUERL MODEL_DIR DIALOGUES

QUERL is the built command, MODEL_DIR a model with tokenizer (examples/tiny-qwen3), DIALOGUES labelled dialogues (examples/style/seed26.json).
Trains every weight, and an adapter; for each compares the output of `querl style predict` for all dialogues with transformers in one padded
batch. Exits with 1 if a probability differs by more than 1e-4.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import common  # noqa: F401  (no network, one thread)
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

TOLERANCE = 1e-4


def run(querl, *arguments):
    return subprocess.run([querl, "-q", "rm", *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def probabilities(model, tokenizer, texts):
    inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=512)
    with torch.no_grad():
        return torch.softmax(model.eval()(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits, dim=-1)


def compare(kind, querl, texts, arguments, model, tokenizer):
    said = [json.loads(line)["probabilities"] for line in run(querl, "predict", *arguments, "--json").splitlines()]
    found = probabilities(model, tokenizer, texts)
    names = [model.config.id2label[id] for id in range(found.shape[1])]
    own = torch.tensor([[row[name] for name in names] for row in said])
    worst = (own - found).abs().max().item()
    print(f"{kind}: {len(texts)} texts, largest difference of a probability {worst:.1e}")
    return worst <= TOLERANCE


def main():
    querl, base, dialogues = sys.argv[1:4]
    texts = [row["input"] for row in json.loads(Path(dialogues).read_text(encoding="utf-8"))]
    with tempfile.TemporaryDirectory() as folder:
        whole, adapter = Path(folder) / "whole", Path(folder) / "adapter"
        shared = ["--model_name_or_path", base, "--train_file", dialogues, "--num_train_epochs", 2, "--learning_rate", 1e-3, "--dev_share", 0.2]
        run(querl, "train", *shared, "--output_dir", whole)
        run(querl, "train", *shared, "--output_dir", adapter, "--lora_rank", 8)
        tokenizer = AutoTokenizer.from_pretrained(whole)
        model = AutoModelForSequenceClassification.from_pretrained(whole, dtype=torch.float32)
        tokenizer.pad_token_id = model.config.pad_token_id
        is_good = compare("every weight", querl, texts, ["--model", whole, "--file", dialogues], model, tokenizer)

        mapping = json.loads((adapter / "label_mapping.json").read_text(encoding="utf-8"))
        names = {int(id): name for id, name in mapping["id_to_label"].items()}
        plain = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=len(names), id2label=names, pad_token_id=model.config.pad_token_id, dtype=torch.float32
        )
        adapted = PeftModel.from_pretrained(plain, adapter)
        arguments = ["--model", adapter, "--base", base, "--file", dialogues]
        is_good = compare("adapter", querl, texts, arguments, adapted, tokenizer) and is_good
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
