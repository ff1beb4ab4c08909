"""Runs both sides of the comparison alternately and prints the ratios.

    run.py survey [WORK...] [--shape S] [--dtype f32]   # every setting of the reference once, to find the fastest
    run.py compare [WORK...] [--shape S] [--dtype f32] [--rounds 3]
    run.py curve [--shape S]                             # losses of 50 steps from one adapter in one order
    run.py builds [WORK...] --than BENCH [--rounds 3]    # querl's times divided by those of another build of its benchmark

WORK is any of sft, rollout, ppo, full (default: all). Each run is a separate process on the cores of `--cores`. The sides alternate (querl,
reference, querl, ...), so that other load on the machine affects both. The peak memory of a process is read from the kernel. Results are added
to work/results.json. Only the standard library is used, because the peak memory of a child process starts with that of its parent.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
WORK = HERE / "work"
BEST = HERE / "best.json"
BENCH = REPOSITORY / "target/release/examples/bench"

# Freed pages are kept and one heap serves all threads: the fastest malloc settings found for temporary tensors. `survey` compares them
# with glibc's default. querl has its own allocator.
TUNED_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "68719476736",
}

# For each work: the script of the reference, its settings to survey, and the unit of one repetition.
WORKS = {
    "sft": ("sft.py", ["padded", "padded-eager", "by-length", "padding-free", "packed", "small-batch", "autocast"], "epoch"),
    "rollout": ("generate.py", ["n", "n-eager", "n-static", "repeated", "n-batch-8", "n-adapter", "prefix-by-hand"], "tokens"),
    "ppo": ("ppo.py", ["lora", "lora-16", "lora-64", "lora-shared", "lora-checkpointing", "full-value"], "iteration"),
    "full": ("full.py", ["padded", "padded-responses", "by-length-responses", "padding-free-responses"], "epoch"),
}
# Measured as a note: not a setting of the reference, or one that only saves memory.
NOTES = {"prefix-by-hand", "lora-shared", "lora-checkpointing", "n-adapter"}
# Arguments of both sides, by work and shape. M is smaller, because a rollout of all 128 responses takes the reference minutes.
SIZES = {
    ("sft", "S"): {"epochs": 3},
    ("full", "S"): {"epochs": 3},
    ("rollout", "S"): {"repeats": 3},
    ("ppo", "S"): {"repeats": 2},
    ("sft", "M"): {"epochs": 2, "limit": 32},
    ("full", "M"): {"epochs": 2, "limit": 16},
    ("rollout", "M"): {"repeats": 1, "limit": 8, "max-new": 16},
    ("ppo", "M"): {"repeats": 1, "limit": 4, "max-new": 16, "mini-batch": 4},
}

# With --quick: enough to check that both sides run, and for a rough comparison.
QUICK = {
    "sft": {"epochs": 2, "limit": 48},
    "full": {"epochs": 2, "limit": 48},
    "rollout": {"repeats": 2, "limit": 8, "max-new": 16},
    "ppo": {"repeats": 1, "limit": 4, "max-new": 16, "mini-batch": 16},
}


def child(command, extra_environment, cores):
    """Runs a command; returns its RESULT line, with the seconds and the kernel's figure of its peak memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "MKL_NUM_THREADS": str(len(cores))}
    environment.update({"RAYON_NUM_THREADS": str(len(cores)), "PYTHONPATH": ""}, **extra_environment)
    if os.environ.get("BENCH_SHARED_MACHINE"):
        # Waiting threads yield their core: otherwise OpenMP is ten times slower or more on a busy machine.
        environment.update({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"})
    started = time.monotonic()
    with subprocess.Popen(
        command, env=environment, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ) as process:  # fmt: skip
        output, errors = drain(process)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not lines:
        sys.exit(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{errors[-3000:]}")
    return {**json.loads(lines[-1][7:]), "peak_mib": usage.ru_maxrss / 1024, "wall_s": time.monotonic() - started}


def drain(process):
    """Reads both pipes to their end without reaping the process: `wait4` then returns its peak memory."""
    import threading

    errors = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    reader.start()
    output = process.stdout.read()
    reader.join()
    return output, errors[0]


def arguments(values):
    return [part for key, value in values.items() for part in (f"--{key}", str(value))]


def sizes(work, shape):
    return QUICK[work] if "--quick" in sys.argv else SIZES.get((work, shape), {})


def data_of(work):
    return WORK / ("fivedoctors.json" if work in ("sft", "full") else "prompts.json")


def ours(work, shape, dtype, cores, bench=BENCH, **more):
    options = {"model": WORK / shape, "dtype": dtype, "data": data_of(work), **sizes(work, shape), **more}
    return child([bench, work, *arguments({**options, "threads": len(cores)})], {}, cores)


def theirs(work, shape, dtype, cores, setting, malloc, **more):
    script = WORKS[work][0]
    options = {"model": WORK / shape, "dtype": dtype, "data": data_of(work), "name": setting}
    options.update(sizes(work, shape), **more)
    environment = dict(TUNED_MALLOC) if malloc == "tuned" else {}
    if work == "ppo":
        environment["PYTHONPATH"] = str(HERE / ".ppo")
    return child([HERE / ".venv/bin/python", script, *arguments(options)], environment, cores)


def cost(work, result):
    """Seconds of the fastest repetition; for a rollout, seconds per token."""
    if work == "rollout":
        return min(seconds / tokens for seconds, tokens in zip(result["seconds"], result["tokens"]))
    return min(result["seconds"])


def processor_cost(work, result):
    """As `cost`, in CPU seconds of all threads, which depend less on other load of the machine."""
    return cost(work, {**result, "seconds": result["cpu_seconds"]})


def key(work, shape, dtype):
    return f"{work}/{shape}/{dtype}"


def survey(settings):
    """Runs every setting of the reference with both allocators; the fastest is used for the comparison."""
    best = json.loads(BEST.read_text()) if BEST.is_file() else {}
    for work in settings.work:
        found = {}
        for setting in WORKS[work][1]:
            if setting == "autocast" and settings.dtype == "f32":
                continue
            for malloc in ("tuned", "default"):
                result = theirs(work, settings.shape, settings.dtype, settings.cores, setting, malloc)
                found[f"{setting} {malloc}"] = (cost(work, result), result["peak_mib"])
                print(f"{key(work, settings.shape, settings.dtype)} {setting} malloc={malloc}: {cost(work, result):.4g} s, "
                      f"of the processor {processor_cost(work, result):.4g} s, {result['peak_mib']:.0f} MiB",
                      flush=True)  # fmt: skip
        offered = {name: values for name, values in found.items() if name.split()[0] not in NOTES}
        name = min(offered, key=lambda name: offered[name][0])
        best[key(work, settings.shape, settings.dtype)] = {
            "setting": name.split()[0], "malloc": name.split()[1],
            "measured": {name: [float(f"{s:.4g}"), round(m)] for name, (s, m) in found.items()},
        }  # fmt: skip
        BEST.write_text(json.dumps(best, indent=1, sort_keys=True) + "\n")


def median(values):
    values = sorted(values)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def compare(settings):
    """Runs both sides alternately; prints ratios of times per round, and of peak memory."""
    best = json.loads(BEST.read_text()) if BEST.is_file() else {}
    results = WORK / "results.json"
    kept = json.loads(results.read_text()) if results.is_file() else {}
    for work in settings.work:
        name = key(work, settings.shape, settings.dtype)
        chosen = best.get(name) or best.get(key(work, settings.shape, "f32")) or best.get(key(work, "S", "f32"))
        chosen = chosen or {"setting": WORKS[work][1][0], "malloc": "tuned"}
        pairs = []
        for _ in range(settings.rounds):
            mine = ours(work, settings.shape, settings.dtype, settings.cores)
            other = theirs(work, settings.shape, settings.dtype, settings.cores, chosen["setting"], chosen["malloc"])
            pairs.append((mine, other))
        kept[name] = summary(work, chosen, pairs)
        print(line(name, kept[name]), flush=True)
        results.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def summary(work, chosen, pairs):
    times = [(cost(work, mine), cost(work, other)) for mine, other in pairs]
    peaks = [(mine["peak_mib"], other["peak_mib"]) for mine, other in pairs]
    ratios = [other / mine for mine, other in times]
    return {
        "reference": f"{chosen['setting']}, {chosen['malloc']} malloc",
        "ours_s": min(mine for mine, _ in times), "theirs_s": min(other for _, other in times),
        "ratio_of_minima": min(other for _, other in times) / min(mine for mine, _ in times),
        "ratio_median": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
        "ours_cpu_s": min(processor_cost(work, mine) for mine, _ in pairs),
        "theirs_cpu_s": min(processor_cost(work, other) for _, other in pairs),
        "ours_mib": max(mine for mine, _ in peaks), "theirs_mib": min(other for _, other in peaks),
        "timings": pairs[-1][0].get("timings"), "wall_s": sum(mine["wall_s"] + other["wall_s"] for mine, other in pairs),
    }  # fmt: skip


def line(name, found):
    unit = "s a token" if name.startswith("rollout") else "s"
    return (
        f"{name} against {found['reference']}: {found['ours_s']:.4g} {unit} and {found['theirs_s']:.4g}: "
        f"{found['ratio_of_minima']:.2f} times (rounds {found['ratio_min']:.2f} to {found['ratio_max']:.2f}, median "
        f"{found['ratio_median']:.2f}; of the processor {found['theirs_cpu_s'] / (found['ours_cpu_s'] or float('nan')):.2f}); {found['ours_mib']:.0f} MiB and {found['theirs_mib']:.0f}: "
        f"1/{found['theirs_mib'] / found['ours_mib']:.2f} ({found['wall_s']:.0f} s in all)"
    )


def curve(settings):
    """Losses of 50 steps from the same adapter, with rows in the same order."""
    # A number of rows with which every step has 16: at the end of an epoch querl takes the remaining rows, and TRL starts the next epoch.
    epochs, limit = 4, 224
    order = {"data": data_of("sft"), "epochs": epochs, "limit": limit}
    order = child([BENCH, "order", *arguments(order)], {}, settings.cores)["order"]
    path = WORK / "order.json"
    path.write_text(json.dumps(order))
    rate = {"learning-rate": 1e-3, "epochs": epochs, "limit": limit}
    mine = ours("sft", settings.shape, settings.dtype, settings.cores, **{**rate, "max-steps": 50})["losses"]
    other = theirs("sft", settings.shape, settings.dtype, settings.cores, "padded", "tuned",
                   **{**rate, "steps": 50, "losses": 1, "order": path})["losses"]  # fmt: skip
    worst = max(abs(a - b) for a, b in zip(mine, other, strict=True))
    print(f"curve/{settings.shape}/{settings.dtype}: loss {mine[0]:.4f} to {mine[-1]:.4f} in {len(mine)} steps; "
          f"largest difference to TRL's {worst:.1e}")  # fmt: skip
    sys.exit(worst > 1e-3)


def builds(settings):
    """Runs two builds of querl's benchmark alternately; prints the times of this one divided by those of the other."""
    for work in settings.work:
        runs = {BENCH: [], settings.than: []}
        for _ in range(settings.rounds):
            for bench, results in runs.items():
                results.append(ours(work, settings.shape, settings.dtype, settings.cores, bench=bench))
        this, other = ([(cost(work, run), processor_cost(work, run)) for run in results] for results in runs.values())
        time, processor = (min(of[part] for of in this) / min(of[part] for of in other) for part in (0, 1))
        print(f"{key(work, settings.shape, settings.dtype)}: {time:.2f} of the time of {settings.than} "
              f"({processor:.2f} of the processor)", flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["survey", "compare", "curve", "builds"])
    parser.add_argument("work", nargs="*", default=[], help="sft, rollout, ppo, full")
    parser.add_argument("--shape", default="S")
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--than", type=Path, default=BENCH, metavar="BENCH", help="for builds: the benchmark of another commit")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it runs, not how fast")
    parser.add_argument("--cores", default="0,1", type=lambda text: [int(core) for core in text.split(",")])
    settings = parser.parse_args()
    unknown = [work for work in settings.work if work not in WORKS]
    if unknown:
        parser.error(f"{unknown[0]}: expected any of {', '.join(WORKS)}")
    settings.work = settings.work or list(WORKS)
    {"survey": survey, "compare": compare, "curve": curve, "builds": builds}[settings.command](settings)


if __name__ == "__main__":
    main()
