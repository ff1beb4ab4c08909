"""Loads a model and an adapter made by querl in transformers and PEFT, and compares log-probabilities with querl's.

    python exchange.py QUERL MODEL_DIR ADAPTER_DIR ROWS_JSONL

QUERL is the built command; ROWS_JSONL a dataset split of a run (`data/val.jsonl`). Exits with 1 if tokens differ or a log-probability differs
by more than 1e-4.
"""

import json
import subprocess
import sys
import tempfile

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

TOLERANCE = 1e-4
N_ROWS = 5


def of_querl(querl, model_dir, texts, *adapter):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        file.flush()
        command = [querl, "model", "logprobs", "--model", model_dir, "--input", file.name, *adapter]
        return [json.loads(line) for line in subprocess.run(command, capture_output=True, check=True).stdout.splitlines()]


def worst_difference(model, lines):
    worst = 0.0
    for line in lines:
        ids = torch.tensor([line["token_ids"]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        worst = max(worst, (torch.tensor(line["logprobs"][1:]) - expected).abs().max().item())
    return worst


def main(querl, model_dir, adapter_dir, rows):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with open(rows, encoding="utf-8") as file:
        texts = [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in file][:N_ROWS]
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    base = of_querl(querl, model_dir, texts)
    tuned = of_querl(querl, model_dir, texts, "--adapter", adapter_dir)
    if [line["token_ids"] for line in base] != tokens:
        sys.exit("the tokens differ")
    # PEFT modifies the base in place, so that the base model is compared first.
    differences = {"base": worst_difference(model, base)}
    differences["adapter"] = worst_difference(PeftModel.from_pretrained(model, adapter_dir), tuned)
    for name, difference in differences.items():
        print(f"{name}: largest difference of a log-probability {difference:.1e} over {N_ROWS} conversations")
    if max(differences.values()) > TOLERANCE:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
