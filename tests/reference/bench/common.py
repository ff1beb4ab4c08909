"""Shared by the reference scripts of each comparison: shapes, folders, options, and the result line that `run.py` reads."""

import argparse
import gc
import json
import os
import resource
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

HERE = Path(__file__).resolve().parent
WORK = HERE / "work"
N_THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

torch.set_num_threads(N_THREADS)


def options(description, **defaults):
    """Command-line options: one per keyword, with the type of its default; always `model` and `dtype`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=str(WORK / "S"), help="a model directory")
    parser.add_argument("--dtype", default="f32", choices=DTYPES)
    for name, default in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), default=default, type=type(default))
    return parser.parse_args()


def load_model(settings, attn="sdpa"):
    """The decoder in the requested dtype, without trainable weights."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(settings.model, dtype=DTYPES[settings.dtype], attn_implementation=attn)


def with_adapter(model, directory, trainable=True):
    """The model with the initial adapter from which both sides start; the adapter is f32, as in PEFT's training."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, directory, is_trainable=trainable)


def rows(path, split="train"):
    """Rows of a data file: prompts and responses as token ids."""
    return json.loads(Path(path).read_text())[split]


def now():
    """Wall-clock time, and CPU time of all threads, in seconds."""
    return time.perf_counter(), time.process_time()


class Stopwatch:
    """Seconds of each repetition: wall-clock time, and CPU time of all threads."""

    def __init__(self):
        self.seconds, self.cpu_seconds = [], []

    def __enter__(self):
        gc.collect()
        self.started = now()

    def __exit__(self, *_):
        self.add(self.started, now())

    def add(self, start, end):
        self.seconds.append(end[0] - start[0])
        self.cpu_seconds.append(end[1] - start[1])


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def report(stopwatch, **values):
    """Prints one line of JSON, the last of the process: `seconds` of each repetition and further values for the comparison."""
    times = {"seconds": stopwatch.seconds, "cpu_seconds": stopwatch.cpu_seconds}
    print("RESULT " + json.dumps({**times, **values, "peak_mib": round(peak_mib(), 1)}), flush=True)
