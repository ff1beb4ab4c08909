"""Growth of querl's time and memory with batch, prompt, response, samples per prompt, and model size.

    scaling.py [--dtype f32] [--repeats 3]

In each series one size is doubled repeatedly while the others are fixed. The exponent is the slope of the logarithms, by least squares: 1 is
proportional, 0 is independent. Memory is the peak of the process minus that of a process that does almost nothing with the same model. Prompts
share three quarters of their length, as the prompts of a tenant do, unless the series says otherwise.
"""

import argparse
import json
import math
import random

from run import WORK, arguments, child, BENCH, cost

# The sizes that are fixed in each series.
BASE = {"prompts": 16, "prompt": 128, "shared": 96, "response": 32, "n": 4, "shape": "S"}
# name: (work, varied size, its values)
SERIES = {
    "sft, batch": ("sft", "prompts", [8, 16, 32, 64]),
    "sft, prompt": ("sft", "prompt", [64, 128, 256, 512]),
    "sft, response": ("sft", "response", [16, 32, 64, 128]),
    "sft, model": ("sft", "shape", ["S", "S2", "S3", "S4"]),
    "rollout, prompts": ("rollout", "prompts", [8, 16, 32, 64]),
    "rollout, prompt": ("rollout", "prompt", [64, 128, 256, 512]),
    "rollout, response": ("rollout", "response", [16, 32, 64, 128]),
    "rollout, samples": ("rollout", "n", [1, 2, 4, 8]),
    "rollout, model": ("rollout", "shape", ["S", "S2", "S3", "S4"]),
    "ppo, samples": ("ppo", "n", [1, 2, 4, 8]),
}


def data(sizes):
    """Prompts, with responses for training; random ids that depend only on the sizes."""
    draw = random.Random(0)
    n_shared = sizes["prompt"] * sizes["shared"] // BASE["prompt"]
    ids = lambda n: [draw.randrange(3, 2400) for _ in range(n)]  # noqa: E731
    shared = ids(n_shared)
    rows = [{"prompt": shared + ids(sizes["prompt"] - n_shared), "response": ids(sizes["response"])} for _ in range(sizes["prompts"])]
    path = WORK / "scaling.json"
    path.write_text(json.dumps({"train": rows}))
    return path


def measure(work, sizes, settings):
    options = {"model": WORK / sizes["shape"], "data": data(sizes), "dtype": settings.dtype, "n": sizes["n"]}
    options.update({"max-new": sizes["response"], "repeats": settings.repeats})
    if work == "sft":  # One step is one epoch.
        options.update({"epochs": settings.repeats + 1, "rows": sizes["prompts"]})
    result = child([BENCH, work, *arguments(options)], {}, settings.cores)
    rest = child([BENCH, "rollout", *arguments({**options, "limit": 1, "n": 1, "max-new": 1, "repeats": 1})], {}, settings.cores)
    seconds = cost(work, result) * (result["tokens"][0] if work == "rollout" else 1)
    return seconds, result["peak_mib"] - rest["peak_mib"], result["peak_mib"]


def weights(shape):
    """Number of weights of a shape's linear layers and embedding."""
    config = json.loads((WORK / shape / "config.json").read_text())
    width, inner = config["hidden_size"], config["intermediate_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    return config["num_hidden_layers"] * (2 * width * width + 2 * width * kv + 3 * width * inner) + config["vocab_size"] * width


def exponent(sizes, costs):
    """Slope of log cost over log size."""
    points = [(math.log(size), math.log(max(value, 1e-9))) for size, value in zip(sizes, costs)]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--repeats", default=3, type=int)
    parser.add_argument("--cores", default=[0, 1], type=lambda text: [int(core) for core in text.split(",")])
    settings = parser.parse_args()
    print("| what grows | sizes | time, ms | exponent | memory beyond the model, MiB | exponent |\n|---|---|---|---|---|---|")
    for name, (work, varied, values) in SERIES.items():
        found = [measure(work, {**BASE, varied: value}, settings) for value in values]
        numbers = [weights(value) for value in values] if varied == "shape" else values
        seconds, memory, _ = zip(*found)
        labels = [f"{number / 1e6:.1f} M" for number in numbers] if varied == "shape" else map(str, numbers)
        print(f"| {name} | {', '.join(labels)} | {', '.join(f'{s * 1e3:.0f}' for s in seconds)} | {exponent(numbers, seconds):.2f} | "
              f"{', '.join(f'{m:.0f}' for m in memory)} | {exponent(numbers, memory):.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
