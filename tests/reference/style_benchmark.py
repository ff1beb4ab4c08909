"""`querl rm` beside transformers: time and peak memory of training, accuracy over seeds, texts a second.

Usage: style_benchmark.py QUERL MODEL_DIR DIALOGUES [--seeds N] [--epochs N] [--threads N]

Both learn every weight of the same model from the same dialogues, in f32, with the same epochs, batch, learning rate and schedule, and are
measured on the same held-out ones (a fifth, groups whole, another fifth for each seed). Each training is a process of its own, whose wall
time and peak resident memory include loading. transformers pads a batch to its longest text (`dynamic`), and to 512 tokens as the
training script that people know does (`max_length`, first seed only). Last, both are asked about all dialogues ten times over: querl by one
`predict` of a file, transformers by a pipeline with batches of 32; both with the time to start and without.

Prints one line of JSON a figure.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH, RATE, MAX_LENGTH, N_COPIES = 16, 1e-3, 512, 10


def tell(**figure):
    print(json.dumps(figure, ensure_ascii=False), flush=True)


def measured(command):
    """Seconds, peak resident MiB and stdout of a process."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(list(map(str, command)), stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            raise SystemExit(f"{' '.join(map(str, command))}: status {status}")
        out.seek(0)
        return time.perf_counter() - started, usage.ru_maxrss / 1024, out.read()


def split(rows, seed):
    groups = sorted({row["metadata"].get("group", row["input"]) for row in rows})
    random.Random(seed).shuffle(groups)
    held_out = set(groups[: len(groups) // 5])
    is_held_out = [row["metadata"].get("group", row["input"]) in held_out for row in rows]
    return [row for row, out in zip(rows, is_held_out) if not out], [row for row, out in zip(rows, is_held_out) if out]


def write(path, rows):
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return path


def trainer(arguments):
    """One training by transformers' Trainer, in this process; prints the accuracy."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    torch.set_num_threads(arguments.threads)
    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    train, test = (json.loads(Path(file).read_text(encoding="utf-8")) for file in (arguments.train, arguments.test))
    labels = sorted({row["label"] for row in train})
    model = AutoModelForSequenceClassification.from_pretrained(
        arguments.model, num_labels=len(labels), pad_token_id=tokenizer.pad_token_id, dtype=torch.float32
    )

    def rows(part):
        padding = "max_length" if arguments.padding == "max_length" else False
        encoded = tokenizer([row["input"] for row in part], truncation=True, max_length=MAX_LENGTH, padding=padding)
        keys = ("input_ids", "attention_mask")
        return [{**{key: encoded[key][i] for key in keys}, "labels": labels.index(row["label"])} for i, row in enumerate(part)]

    settings = TrainingArguments(
        output_dir=arguments.out,
        num_train_epochs=arguments.epochs,
        learning_rate=RATE,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=8,
        weight_decay=0.01,
        seed=arguments.seed,
        report_to=[],
        save_strategy="epoch",
        save_total_limit=1,
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    fit = Trainer(model=model, args=settings, train_dataset=rows(train), data_collator=DataCollatorWithPadding(tokenizer))
    fit.train()
    fit.save_model(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    predicted = fit.predict(rows(test))
    right = (predicted.predictions.argmax(-1) == predicted.label_ids).mean()
    print(json.dumps({"accuracy": float(right)}))


def pipeline(arguments):
    """Texts a second of a transformers pipeline, in this process."""
    import torch
    from transformers import pipeline as make

    torch.set_num_threads(arguments.threads)
    texts = [row["input"] for row in json.loads(Path(arguments.test).read_text(encoding="utf-8"))]
    asked = make("text-classification", model=arguments.model, top_k=None, batch_size=32, device="cpu", truncation=True, max_length=MAX_LENGTH)
    asked(texts[:32])
    started = time.perf_counter()
    asked(texts)
    print(json.dumps({"texts_per_second": len(texts) / (time.perf_counter() - started)}))


def compare(arguments):
    rows = json.loads(Path(arguments.dialogues).read_text(encoding="utf-8"))
    here = [sys.executable, __file__]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        found = {"querl": [], "transformers": []}
        for seed in range(arguments.seeds):
            train, test = split(rows, seed)
            files = write(folder / "train.json", train), write(folder / "test.json", test)
            own = folder / f"querl{seed}"
            shared = ["--num_train_epochs", arguments.epochs, "--learning_rate", RATE, "--per_device_train_batch_size", BATCH, "--seed", seed]
            command = [arguments.querl, "-q", "rm", "train", "--model_name_or_path", arguments.model, "--train_file", files[0]]
            command += ["--output_dir", own, "--eval_share", 0, "--dev_share", 0, "--threads", arguments.threads, *shared]
            seconds, mib, _ = measured(command)
            run = [arguments.querl, "-q", "rm", "eval", "--model", own, "--file", files[1], "--out", folder / "figures"]
            measured(run)
            accuracy = json.loads((folder / "figures/eval.json").read_text(encoding="utf-8"))["eval_accuracy"]
            found["querl"].append(accuracy)
            tell(what="training", by="querl", seed=seed, seconds=seconds, peak_mib=mib, accuracy=accuracy)
            for padding in ("dynamic", "max_length") if seed == 0 else ("dynamic",):
                other = folder / f"transformers{seed}"
                command = [*here, "--as", "trainer", "--model", arguments.model, "--train", files[0], "--test", files[1], "--out", other]
                command += ["--padding", padding, "--seed", seed, "--epochs", arguments.epochs, "--threads", arguments.threads]
                seconds, mib, out = measured(command)
                accuracy = json.loads(out.splitlines()[-1])["accuracy"]
                tell(what="training", by=f"transformers, {padding}", seed=seed, seconds=seconds, peak_mib=mib, accuracy=accuracy)
                if padding == "dynamic":
                    found["transformers"].append(accuracy)
        for by, values in found.items():
            spread = statistics.stdev(values) if len(values) > 1 else None
            tell(what="accuracy", by=by, mean=statistics.mean(values), standard_deviation=spread, n_seeds=len(values))
        many = write(folder / "many.json", rows * N_COPIES)
        one = write(folder / "one.json", rows[:1])
        predict = [arguments.querl, "-q", "rm", "predict", "--model", folder / "querl0", "--json", "--threads", arguments.threads, "--file"]
        start, _, _ = measured([*predict, one])
        seconds, mib, _ = measured([*predict, many])
        n = len(rows) * N_COPIES
        tell(what="prediction", by="querl", texts_per_second=n / (seconds - start), whole_process=n / seconds, peak_mib=mib)
        command = [*here, "--as", "pipeline", "--model", folder / "transformers0", "--test", many, "--threads", arguments.threads]
        seconds, mib, out = measured(command)
        rate = json.loads(out.splitlines()[-1])["texts_per_second"]
        tell(what="prediction", by="transformers", texts_per_second=rate, whole_process=n / seconds, peak_mib=mib)


def main():
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    parser = argparse.ArgumentParser()
    inner = "--as" in sys.argv
    for name in () if inner else ("querl", "model", "dialogues"):
        parser.add_argument(name)
    parser.add_argument("--as", dest="role")
    for name in ("--model", "--train", "--test", "--out", "--padding") if inner else ():
        parser.add_argument(name)
    for name, default in (("--seed", 0), ("--seeds", 5), ("--epochs", 10), ("--threads", 2)):
        parser.add_argument(name, type=int, default=default)
    arguments = parser.parse_args()
    {"trainer": trainer, "pipeline": pipeline, None: compare}[arguments.role](arguments)


if __name__ == "__main__":
    main()
