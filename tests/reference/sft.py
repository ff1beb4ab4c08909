"""Fifty steps of transformers' Trainer on a PEFT adapter, and the learning rate factors of three schedules, in golden/sft.json.

The adapter is golden/lora/qwen3-tied on golden/decoders/qwen3-tied. Rows are used in the order of the file. A row is a prompt, whose tokens are
not in the loss, and a response that is a function of the prompt, so that it can be learned.
"""

import shutil
import tempfile

from common import GOLDEN, generator, write_json
import peft
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, get_scheduler

STEPS, ROWS_PER_STEP, WARMUP = 50, 4, 5
SETTINGS = {"learning_rate": 1e-2, "weight_decay": 0.01, "max_grad_norm": 1.0}
IGNORED = -100


def rows():
    """The response is the reversed prompt, then token 1. Lengths differ within a step."""
    rng = generator(91)
    made = []
    for _ in range(STEPS * ROWS_PER_STEP):
        length = int(torch.randint(1, 5, (1,), generator=rng))
        words = torch.randint(4, 12, (length,), generator=rng).tolist()
        made.append({"prompt": [3, *words], "response": [*reversed(words), 1]})
    return made


def collate(batch):
    """Padded on the right; prompts and padding are not in the loss."""
    longest = max(len(row["prompt"]) + len(row["response"]) for row in batch)
    ids, mask, labels = [], [], []
    for row in batch:
        n_prompt, n_all = len(row["prompt"]), len(row["prompt"]) + len(row["response"])
        padding = longest - n_all
        ids.append(row["prompt"] + row["response"] + [0] * padding)
        mask.append([1] * n_all + [0] * padding)
        labels.append([IGNORED] * n_prompt + row["response"] + [IGNORED] * padding)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}


class Recorded(Trainer):
    """A Trainer without shuffling that records each micro-batch's share of the step's loss, because the Trainer's log is rounded."""

    shares, norms, rates = [], [], []

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert num_items_in_batch is not None  # otherwise a step's loss would be a mean of means
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.shares.append(loss.item())
        return loss

    def log(self, logs, *args):
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))
            self.rates.append(logs["learning_rate"])


def curve():
    base = AutoModelForCausalLM.from_pretrained(GOLDEN / "decoders/qwen3-tied", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, GOLDEN / "lora/qwen3-tied", is_trainable=True)
    output = tempfile.mkdtemp()
    arguments = TrainingArguments(
        output_dir=output, max_steps=STEPS, per_device_train_batch_size=ROWS_PER_STEP // 2,
        gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_steps=WARMUP, optim="adamw_torch",
        logging_steps=1, save_strategy="no", report_to=[], remove_unused_columns=False, use_cpu=True,
        disable_tqdm=True, **SETTINGS,
    )  # fmt: skip
    made = rows()
    trainer = Recorded(model=model, args=arguments, train_dataset=made, data_collator=collate)
    trainer.train()
    shutil.rmtree(output)
    losses = [sum(trainer.shares[2 * step : 2 * step + 2]) for step in range(STEPS)]
    return {
        "settings": SETTINGS | {"rows_per_step": ROWS_PER_STEP, "warmup_steps": WARMUP}, "rows": made,
        "loss": losses, "grad_norm": trainer.norms, "learning_rate": trainer.rates,
    }  # fmt: skip


def schedules():
    found = {}
    for name in ("cosine", "linear", "constant_with_warmup"):
        for n_warmup, n_steps in ((0, 7), (3, 12), (12, 12)):
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
            schedule = get_scheduler(name, optimizer, num_warmup_steps=n_warmup, num_training_steps=n_steps)
            factors = []
            for _ in range(n_steps + 2):
                factors.append(schedule.get_last_lr()[0])
                optimizer.step()
                schedule.step()
            kind = name.removesuffix("_with_warmup")
            found[f"{kind} {n_warmup}/{n_steps}"] = {
                "kind": kind, "n_warmup": n_warmup, "n_steps": n_steps, "factors": factors,
            }  # fmt: skip
    return found


if __name__ == "__main__":
    golden = {
        "versions": {
            "torch": torch.__version__.split("+")[0], "transformers": transformers.__version__, "peft": peft.__version__,
        },
        "curve": curve(), "schedules": schedules(),
    }  # fmt: skip
    write_json(GOLDEN / "sft.json", golden)
    losses = golden["curve"]["loss"]
    print("sft.json: loss", [round(loss, 3) for loss in losses[::7]])
