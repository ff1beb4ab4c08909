#!/usr/bin/env python3
"""The effect of options of `rl` and `sft` on several tasks and seeds: the best reward on the validation split, compared with the defaults.

    tests/tasks/ablation.py --out runs/ablation [--tasks telecom appliances fivedoctors] [--seeds 42 43 44 45 46] [--only PATTERN]
                            [--jobs N] [--threads N] [--set KEY=VALUE] [--querl PATH]

All variants of a task and a seed start from one SFT run, except those with other data or another SFT, whose reward before RL is printed too.
The test split is not read. Differences are paired by seed, with a 95 % interval of Student's t over the seeds. With this many variants, one or
two `*` are expected by chance. Tasks are those of run.py (a base that exists in OUT/TASK/model is not made again; `appliances` has its own) and
`fivedoctors`, the example with its other settings. Finished runs are not repeated. Needs the program and cargo, which builds the plugins; no network.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from run import LANGUAGES, ROOT, prepare

EXAMPLE = ROOT / "examples/fivedoctors/querl.toml"
GROUPS = ("rl.n_samples=8", "rl.batch_size=16", "rl.mini_batch_size=64")
PPO = ("rl.algorithm=ppo", "rl.n_samples=1", "rl.batch_size=64", "rl.mini_batch_size=64")
RLOO = ("rl.algorithm=rloo", *GROUPS)
DEFAULT = "rloo"
VARIANTS = {
    DEFAULT: RLOO,
    "grpo": ("rl.algorithm=grpo", *GROUPS),
    "dr_grpo": ("rl.algorithm=dr_grpo", *GROUPS),
    "reinforce_plus_plus": ("rl.algorithm=reinforce_plus_plus", *GROUPS),
    "ppo": PPO,
    "ppo, critic_warmup_steps = 10": (*PPO, "rl.critic_warmup_steps=10"),
    "raft": ("rl.algorithm=raft", *GROUPS, "rl.ppo_epochs=1", "rl.kl_coef=0.0", "rl.ent_coef=0.0"),
    "grpo, policy_loss = gspo": ("rl.algorithm=grpo", *GROUPS, "rl.policy_loss=gspo", "rl.clip_range=0.0003", "rl.clip_range_high=0.0004"),
    "policy_loss = cispo": (*RLOO, "rl.policy_loss=cispo"),
    "clip_range_high = 0.28": (*RLOO, "rl.clip_range_high=0.28"),
    "loss_agg = token-mean": (*RLOO, "rl.loss_agg=token-mean"),
    "loss_agg = seq-mean-token-sum-norm": (*RLOO, "rl.loss_agg=seq-mean-token-sum-norm"),
    "dynamic_sampling": (*RLOO, "rl.dynamic_sampling=true"),
    "anchor_baseline = 0": (*RLOO, "rl.anchor_baseline=0.0"),
    "overlong_buffer_len = 8": (*RLOO, "rl.overlong_buffer_len=8"),
    "kl_coef = 0": (*RLOO, "rl.kl_coef=0.0"),
    "ppo_epochs = 1": (*RLOO, "rl.ppo_epochs=1"),
    "without filter-quality": (*RLOO, "plugins.filters=[]"),
    "sft.learning_rate = 0.004, lora_rank = 32": (*RLOO, "sft.learning_rate=0.004", "sft.lora_rank=32", "sft.lora_alpha=64.0"),
}
# Quantiles of Student's t for a two-sided 95 % interval, by degrees of freedom; above 9 the value for 9, which is larger.
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def querl(options: argparse.Namespace, config: Path, folder: Path, last: str, settings: list[str]) -> None:
    sets = [part for setting in [*options.set, *settings] for part in ("--set", setting)]
    command = [options.querl, "run", config, "--out", folder, "--to", last, "--threads", options.threads, "-q", *sets]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, encoding="utf-8")
    if done.returncode != 0:
        sys.exit(f"{folder}: exit code {done.returncode}\n{done.stderr[-2000:]}")


def val_rewards(folder: Path) -> list[float]:
    """The rewards of RL's evaluations on the validation split; the first is that of SFT."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["val/reward"] for row in rows if row["stage"] == "rl" and "val/reward" in row]


def best_reward(folder: Path) -> float:
    return max(val_rewards(folder))


def interval(values: list[float]) -> str:
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:+.3f}"
    half = T.get(len(values) - 1, 2.262) * statistics.stdev(values) / len(values) ** 0.5
    sign = "*" if abs(mean) > half else ""
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]{sign}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["telecom", "appliances", "fivedoctors"], choices=[*LANGUAGES, "fivedoctors"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44, 45, 46])
    parser.add_argument("--only", default="", metavar="PATTERN", help="variants whose name has this regular expression, and the default")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=2, help="worker threads of each")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--querl", type=Path, default=ROOT / "target/release/querl")
    options = parser.parse_args()
    out = options.out.resolve()
    variants = {name: sets for name, sets in VARIANTS.items() if name == DEFAULT or re.search(options.only, name)}
    configs = {}
    for task in options.tasks:
        configs[task] = EXAMPLE if task == "fivedoctors" else prepare(task, out, options.querl) / "querl.toml"
        (out / task).mkdir(parents=True, exist_ok=True)

    def folder(task: str, variant: str, seed: int) -> Path:
        return out / task / f"{re.sub('[^a-z0-9]+', '-', variant)}-{seed}"

    def fine_tune(job: tuple[str, int]) -> None:
        task, seed = job
        querl(options, configs[task], folder(task, "sft", seed), "sft", [f"seed={seed}"])

    def shares_sft(variant: str) -> bool:
        return all(setting.startswith("rl.") for setting in variants[variant])

    def train(job: tuple[str, int, str]) -> None:
        task, seed, variant = job
        run = folder(task, variant, seed)
        if shares_sft(variant) and not run.exists():
            new = run.with_name(f"{run.name}.new")
            shutil.rmtree(new, ignore_errors=True)
            shutil.copytree(folder(task, "sft", seed), new)
            new.rename(run)
        querl(options, configs[task], run, "rl", [f"seed={seed}", *variants[variant]])
        print(f"{task}, seed {seed}, {variant}: {best_reward(run):.3f}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(fine_tune, [(task, seed) for seed in options.seeds for task in options.tasks]))
        list(pool.map(train, [(task, seed, name) for seed in options.seeds for name in variants for task in options.tasks]))

    print("\n| variant | " + " | ".join(options.tasks) + " |")
    print("|---" * (1 + len(options.tasks)) + "|")
    for name in variants:
        cells = []
        for task in options.tasks:
            rewards, defaults = ([best_reward(folder(task, of, seed)) for seed in options.seeds] for of in (name, DEFAULT))
            differences = [reward - default for reward, default in zip(rewards, defaults)]
            cell = f"{statistics.mean(rewards):.3f}" if name == DEFAULT else interval(differences)
            sft = statistics.mean(val_rewards(folder(task, name, seed))[0] for seed in options.seeds)
            cells.append(cell if name != DEFAULT and shares_sft(name) else f"{cell} (SFT {sft:.3f})")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
