"""One setting of TRL's SFTTrainer on the rows of a data file: seconds of each epoch, and the loss of each step.

The loss is over response tokens only. `--order` is a file with the row indices in the order of the other side; without it the trainer shuffles.
`--full` trains every weight instead of the initial adapter.
"""

import json
import tempfile
import warnings
from pathlib import Path

from common import Stopwatch, WORK, load_model, now, options, report, rows, with_adapter
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer, TrainerCallback, logging
from trl import SFTConfig, SFTTrainer

warnings.filterwarnings("ignore")
logging.set_verbosity_error()

# Candidates for the fastest setting. `batch` is the number of rows per pass: a step always has `--rows` rows, accumulated if a pass has
# fewer. Two packs of `max_length` contain about 16 rows of the example.
SETTINGS = {
    "padded": {},
    "padded-eager": {"attn": "eager"},
    "by-length": {"group": 1},
    "padding-free": {"padding_free": 1},
    "packed": {"packing": 1, "batch": 2, "rows": 2},
    "small-batch": {"batch": 4},
    "checkpointing": {"checkpointing": 1},
    "autocast": {"autocast": 1},
}


class Clock(TrainerCallback):
    """Records the end time and the loss of each step."""

    def __init__(self):
        self.ends, self.losses = [], []

    def on_train_begin(self, *_, **__):
        self.ends.append(now())

    def on_step_end(self, *_, **__):
        self.ends.append(now())

    def on_log(self, _args, _state, _control, logs=None, **__):
        if "loss" in logs:
            self.losses.append(logs["loss"])


class Trainer(SFTTrainer):
    """SFTTrainer with a fixed order of rows if one is given, and with unrounded losses."""

    in_order = False

    def _get_train_sampler(self, dataset=None):
        if self.in_order:
            return SequentialSampler(self.train_dataset)
        return super()._get_train_sampler(dataset)


def dataset(examples, order):
    order = order or range(len(examples))
    picked = [examples[index] for index in order]
    columns = {
        "input_ids": [row["prompt"] + row["response"] for row in picked],
        "labels": [[-100] * len(row["prompt"]) + row["response"] for row in picked],
    }
    return Dataset.from_dict(columns)


def config(settings, n_steps):
    return SFTConfig(
        output_dir=tempfile.mkdtemp(prefix="sft-"),
        per_device_train_batch_size=settings.batch or settings.rows,
        gradient_accumulation_steps=settings.rows // (settings.batch or settings.rows),
        num_train_epochs=1 if settings.order else settings.epochs,
        max_steps=n_steps or -1,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=bool(settings.autocast),
        packing=bool(settings.packing),
        padding_free=bool(settings.padding_free),
        max_length=576 if settings.packing else None,
        train_sampling_strategy="group_by_length" if settings.group else "random",
        gradient_checkpointing=bool(settings.checkpointing),
        logging_steps=1,
        logging_strategy="steps" if settings.losses else "no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=0,
    )


def main():
    settings = options(
        __doc__.splitlines()[0],
        data=str(WORK / "fivedoctors.json"), name="", rows=16, batch=0, epochs=2, steps=0, limit=0, learning_rate=1e-4, full=0,
        attn="sdpa", group=0, padding_free=0, packing=0, checkpointing=0, autocast=0, losses=0, order="",
    )  # fmt: skip
    vars(settings).update(SETTINGS.get(settings.name, {}))
    torch.manual_seed(0)
    model = load_model(settings, settings.attn)
    if not settings.full:
        model = with_adapter(model, Path(settings.model) / "adapter")
    examples = rows(settings.data)[: settings.limit or None]
    order = json.loads(Path(settings.order).read_text()) if settings.order else None
    clock = Clock()
    trainer = Trainer(
        model=model,
        args=config(settings, settings.steps),
        train_dataset=dataset(examples, order),
        processing_class=AutoTokenizer.from_pretrained(settings.model),
        callbacks=[clock],
    )
    trainer.in_order = order is not None
    trainer.train()
    n_steps = len(clock.ends) - 1
    per_epoch = n_steps // (1 if order else settings.epochs) or n_steps
    stopwatch = Stopwatch()
    for end in range(per_epoch, n_steps + 1, per_epoch):
        stopwatch.add(clock.ends[end - per_epoch], clock.ends[end])
    n_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    report(stopwatch, losses=clock.losses, n_steps=n_steps, n_trained=n_trained)


if __name__ == "__main__":
    main()
