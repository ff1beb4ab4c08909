"""`querl style` compared with transformers: time and peak memory of training, accuracy over seeds, texts per second.

Usage: style_benchmark.py QUERL MODEL_DIR DIALOGUES [--seeds N] [--epochs N] [--threads N]

Both train every weight of the same model on the same dialogues, in f32, with the same epochs, batch size, learning rate and schedule, and predict
the same held-out dialogues (a fifth in complete groups, another fifth for each seed). Each training is a separate process, which loads the model,
trains and saves it without predictions: `seconds` and `peak_mib` are of the whole process, `training_seconds` of its steps, evaluations and
checkpoints (querl: `seconds` of training/summary.json; transformers: the Trainer's `train_runtime`). transformers pads a batch to its longest text
(`dynamic`), and to 512 tokens as usual training scripts do (`max_length`, first seed only). With a dev split (first seed only) both also evaluate
after each epoch. `difference` is querl's accuracy minus transformers' on the same dialogues of all seeds, with the interval of a bootstrap over
groups.

At the end both classify every text of DIALOGUES and of the files seed26.json and unlabelled.json next to it, once unchanged and nine times with a
number before it: no text occurs twice and copies share no prefix, because querl computes common prefixes of a pass only once. querl predicts a
file with one `predict`, transformers uses a pipeline with batches of 32; both with and without the startup time.

Prints one line of JSON per figure.
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

BATCH, RATE, MAX_LENGTH, N_COPIES, DEV_SHARE, N_RESAMPLES = 16, 1e-3, 512, 9, 0.1, 10_000


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


def group(row):
    return row["metadata"].get("group", row["input"])


def split(rows, seed, share=0.2):
    groups = sorted({group(row) for row in rows})
    random.Random(seed).shuffle(groups)
    held_out = set(groups[: int(len(groups) * share)])
    return [row for row in rows if group(row) not in held_out], [row for row in rows if group(row) in held_out]


def write(path, rows):
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return path


def trainer(arguments):
    """One training with transformers' Trainer in this process; prints the seconds of its steps."""
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
    train = json.loads(Path(arguments.train).read_text(encoding="utf-8"))
    labels = sorted({row["label"] for row in train})
    train, dev = split(train, 0, DEV_SHARE if arguments.dev else 0)
    names = dict(enumerate(labels))
    model = AutoModelForSequenceClassification.from_pretrained(
        arguments.model, num_labels=len(labels), id2label=names, pad_token_id=tokenizer.pad_token_id, dtype=torch.float32
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
        eval_strategy="epoch" if dev else "no",
        load_best_model_at_end=bool(dev),
        save_strategy="epoch",
        save_total_limit=1,
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    collator, dev = DataCollatorWithPadding(tokenizer), rows(dev) if dev else None
    fit = Trainer(model=model, args=settings, train_dataset=rows(train), eval_dataset=dev, data_collator=collator)
    seconds = fit.train().metrics["train_runtime"]
    fit.save_model(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(json.dumps({"training_seconds": seconds}))


def said(arguments):
    """Predictions of a model trained with transformers, in this process; prints one label per line."""
    import torch
    from transformers import pipeline as make

    torch.set_num_threads(arguments.threads)
    texts = [row["input"] for row in json.loads(Path(arguments.test).read_text(encoding="utf-8"))]
    asked = make("text-classification", model=arguments.model, batch_size=32, device="cpu", truncation=True, max_length=MAX_LENGTH)
    print(json.dumps([found["label"] for found in asked(texts)], ensure_ascii=False))


def pipeline(arguments):
    """Texts per second of a transformers pipeline, in this process."""
    import torch
    from transformers import pipeline as make

    torch.set_num_threads(arguments.threads)
    texts = [row["input"] for row in json.loads(Path(arguments.test).read_text(encoding="utf-8"))]
    asked = make("text-classification", model=arguments.model, top_k=None, batch_size=32, device="cpu", truncation=True, max_length=MAX_LENGTH)
    asked(texts[:32])
    started = time.perf_counter()
    asked(texts)
    print(json.dumps({"texts_per_second": len(texts) / (time.perf_counter() - started)}))


def by_querl(arguments, files, out, seed, dev_share):
    """Trains with querl; returns the figures of the process and of its steps."""
    command = [arguments.querl, "-q", "rm", "train", "--model_name_or_path", arguments.model, "--train_file", files[0], "--output_dir", out]
    command += ["--eval_share", 0, "--dev_share", dev_share, "--threads", arguments.threads, "--seed", seed]
    command += ["--num_train_epochs", arguments.epochs, "--learning_rate", RATE, "--per_device_train_batch_size", BATCH]
    seconds, mib, _ = measured(command)
    summary = json.loads((out / "training/summary.json").read_text(encoding="utf-8"))
    return {"seconds": seconds, "peak_mib": mib, "training_seconds": summary["seconds"]}


def by_transformers(arguments, files, out, seed, padding, *flags):
    command = [sys.executable, __file__, "--as", "trainer", "--model", arguments.model, "--train", files[0], "--out", out]
    command += ["--padding", padding, "--seed", seed, "--epochs", arguments.epochs, "--threads", arguments.threads, *flags]
    seconds, mib, out = measured(command)
    return {"seconds": seconds, "peak_mib": mib, **json.loads(out.splitlines()[-1])}


def right(test, labels):
    return [int(row["label"] == label) for row, label in zip(test, labels, strict=True)]


def difference(pairs):
    """Mean of differences and its 95% interval; `pairs` contains a group and a difference."""
    by_group = {}
    for name, value in pairs:
        by_group.setdefault(name, []).append(value)
    clusters, rng, means = [by_group[name] for name in sorted(by_group)], random.Random(0), []
    for _ in range(N_RESAMPLES):
        drawn = rng.choices(clusters, k=len(clusters))
        means.append(sum(map(sum, drawn)) / sum(map(len, drawn)))
    cuts = statistics.quantiles(means, n=40)
    return {"mean": statistics.mean(value for _, value in pairs), "low": cuts[0], "high": cuts[-1]}


def train_both(arguments, rows, folder):
    found, pairs = {"querl": [], "transformers": []}, []
    for seed in range(arguments.seeds):
        train, test = split(rows, seed)
        files = write(folder / "train.json", train), write(folder / "test.json", test)
        own, other = folder / f"querl{seed}", folder / f"transformers{seed}"
        tell(what="training", by="querl", seed=seed, **by_querl(arguments, files, own, seed, 0))
        tell(what="training", by="transformers, dynamic", seed=seed, **by_transformers(arguments, files, other, seed, "dynamic"))
        if seed == 0:
            padded = by_transformers(arguments, files, folder / "padded", seed, "max_length")
            tell(what="training", by="transformers, max_length", seed=seed, **padded)
            tell(what="training", by="querl, with dev", seed=seed, **by_querl(arguments, files, folder / "dev", seed, DEV_SHARE))
            with_dev = by_transformers(arguments, files, folder / "dev2", seed, "dynamic", "--dev")
            tell(what="training", by="transformers, dynamic, with dev", seed=seed, **with_dev)
        _, _, out = measured([arguments.querl, "-q", "rm", "predict", "--model", own, "--file", files[1], "--json"])
        of_querl = right(test, [json.loads(line)["predicted_label"] for line in out.splitlines()])
        _, _, out = measured([sys.executable, __file__, "--as", "said", "--model", other, "--test", files[1]])
        of_transformers = right(test, json.loads(out.splitlines()[-1]))
        found["querl"].append(statistics.mean(of_querl))
        found["transformers"].append(statistics.mean(of_transformers))
        pairs += [(group(row), a - b) for row, a, b in zip(test, of_querl, of_transformers)]
    for by, values in found.items():
        spread = statistics.stdev(values) if len(values) > 1 else None
        tell(what="accuracy", by=by, mean=statistics.mean(values), standard_deviation=spread, by_seed=values)
    tell(what="difference", of="accuracy, querl less transformers", **difference(pairs), n=len(pairs))


def many_texts(dialogues):
    files = [dialogues] + [dialogues.parent / name for name in ("seed26.json", "unlabelled.json")]
    texts = {row["input"]: None for file in files if file.is_file() for row in json.loads(file.read_text(encoding="utf-8"))}
    numbered = [f"{10_000 + copy * len(texts) + index} {text}" for copy in range(N_COPIES) for index, text in enumerate(texts)]
    random.Random(0).shuffle(numbered)
    return [{"input": text} for text in [*texts, *numbered]]


def ask_both(arguments, folder):
    rows = many_texts(Path(arguments.dialogues))
    many, one = write(folder / "many.json", rows), write(folder / "one.json", rows[:1])
    predict = [arguments.querl, "-q", "rm", "predict", "--model", folder / "querl0", "--json", "--threads", arguments.threads, "--file"]
    start, _, _ = measured([*predict, one])
    seconds, mib, _ = measured([*predict, many])
    n = len(rows)
    shared = {"what": "prediction", "n": n}
    tell(**shared, by="querl", texts_per_second=n / (seconds - start), whole_process=n / seconds, peak_mib=mib)
    command = [sys.executable, __file__, "--as", "pipeline", "--model", folder / "transformers0", "--test", many, "--threads", arguments.threads]
    seconds, mib, out = measured(command)
    rate = json.loads(out.splitlines()[-1])["texts_per_second"]
    tell(**shared, by="transformers", texts_per_second=rate, whole_process=n / seconds, peak_mib=mib)


def compare(arguments):
    rows = json.loads(Path(arguments.dialogues).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        train_both(arguments, rows, Path(folder))
        ask_both(arguments, Path(folder))


def main():
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    parser = argparse.ArgumentParser()
    inner = "--as" in sys.argv
    for name in () if inner else ("querl", "model", "dialogues"):
        parser.add_argument(name)
    parser.add_argument("--as", dest="role")
    for name in ("--model", "--train", "--test", "--out", "--padding") if inner else ():
        parser.add_argument(name)
    parser.add_argument("--dev", action="store_true")
    for name, default in (("--seed", 0), ("--seeds", 5), ("--epochs", 10), ("--threads", 2)):
        parser.add_argument(name, type=int, default=default)
    arguments = parser.parse_args()
    {"trainer": trainer, "said": said, "pipeline": pipeline, None: compare}[arguments.role](arguments)


if __name__ == "__main__":
    main()
