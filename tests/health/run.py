#!/usr/bin/env python3
"""Hits and false alarms of the health warnings, on 15 healthy trainings and 15 trainings that fail in a known way.

    tests/health/run.py [--runs DIR] [--out FILE] [--jobs N] [--threads N] [--only PATTERN] [--tasks DIR] [--set KEY=VALUE] [--querl PATH] [--list]

Each run is examples/fivedoctors with other settings, up to the stage `rl`; runs with the data and the seed of the example start from one SFT
run. Each failure lists its expected warnings; one of them suffices. Warnings are read from the program's output, which is stored in
RUNS/NAME.log. Finished runs with the same settings are kept, interrupted ones resume. `--tasks` is the folder that `tests/tasks/run.py --out`
wrote: two of the healthy runs and one of the failures then use its tasks. `--out` writes the tables as Markdown. Exit code 1 if a failure has
none of its warnings, a healthy run has one, or a run ended with an error. Needs the program and cargo, which builds the plugins.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/fivedoctors/querl.toml"
HEALTH = ROOT / "host/querl-train/src/rl/health.rs"

# Warnings of `rl`: kind in health.rs, and a phrase of the message.
RL_WARNINGS = {
    "clip": "more than half of the tokens are clipped",
    "kl": "the policy drifts far from the SFT policy",
    "entropy": "the entropy has collapsed",
    "noise": "the entropy has risen",
    "repeats": "most queries get the same response",
    "length": "the length of the responses drifts",
    "cut_off": "more than half of the responses are cut off",
    "no_hits": "retrieval finds nothing for any response",
    "scores": "all responses of ten batches got one score",
    "groups": "the samples of most queries",
    "reward": "the reward is falling",
    "overfit": "the reward rises on the training queries",
    "quality": "the reward rises while retrieval gets worse",
    "value": "the critic explains none of the returns",
    "critic_error": "the critic's errors vary more",
    "critic_still": "the critic gives all tokens nearly the same value",
    "value_clip": "more than half of the critic's values are clipped",
    "kl_coef": "the KL coefficient runs away",
    "importance": "the policy's: ",
    "probs": "log-probabilities of rollout and training differ",
}
# Warnings of other stages, and a stop with an error.
OTHER_WARNINGS = {
    "sft_noise": "the model is noise after sft",
    "few_rows": "are less conclusive",
    "reranking": "reranking lowers",
}
STOPPED = "stopped"
# A phrase in the last line of a training that ended with NaN or Inf. Other errors with exit code 1 do not count as this warning.
NOT_FINITE = re.compile(r"\bNaN\b|\bInf\b|not finite")


@dataclass(frozen=True)
class Run:
    name: str
    settings: tuple[str, ...] = ()
    # Kinds of warnings that count as a hit; empty for a healthy run.
    expected: tuple[str, ...] = ()
    # The run starts from the shared SFT run.
    shares_sft: bool = True
    # The task that is used instead of the example if its folder exists.
    task: str = ""
    # Uses the model of `untrained_base` instead of the example's.
    untrained: bool = False


@dataclass(frozen=True)
class Result:
    run: Run
    # Kind and step of each warning, the latter if known.
    warnings: dict[str, int | None]
    # The program's message if the run failed; otherwise empty.
    problem: str = ""


def plugin(name: str, **settings: str | float) -> str:
    """An entry of `plugins`."""
    weight = settings.pop("weight", 1.0)
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    return f"{{ path = {json.dumps(str(ROOT / name))}, weight = {weight}, settings = {{ {pairs} }} }}"


GROUPS = ("rl.n_samples=8", "rl.batch_size=16")
# The settings of the example. A task has the defaults of a small model: RLOO on 8 samples of 16 queries.
PPO = ("rl.algorithm=ppo", "rl.n_samples=1", "rl.batch_size=64")
EDIT = "data.rewrite_form=edit"
COMPETITION = "plugins/reward-competition"
ENGLISH_PROMPT = (
    f"plugins.prompt={{ path = {json.dumps(str(ROOT / 'plugins/prompt-rewrite'))}, "
    'settings = { language = "en", domain = "health supplements" } }'
)
NO_SCORES = plugin(COMPETITION, weight_win=1.0, weight_retrieval=0.0, weight_judge=0.0, win=0.0, loss=0.0)
BREVITY = plugin("plugins/reward-length", weight=5.0, min_length=1, max_length=24, buffer=23)
LENGTH_HOLE = plugin("tests/hacks/reward-hole", hole="length")

HEALTHY = (
    Run("ppo"),
    Run("ppo-seed-43", ("seed=43",), shares_sft=False),
    Run("ppo-seed-44", ("seed=44",), shares_sft=False),
    Run("ppo-sequence", ("rl.advantage_form=sequence",)),
    Run("ppo-critic-adapter", ("rl.critic=adapter",)),
    Run("ppo-batch-32", ("rl.batch_size=32", "rl.mini_batch_size=32")),
    Run("ppo-kl-0.005", ("rl.kl_coef=0.005",)),
    Run("ppo-kl-0.1", ("rl.kl_coef=0.1",)),
    Run("ppo-edit", (EDIT,), shares_sft=False),
    Run("rloo", ("rl.algorithm=rloo", *GROUPS)),
    Run("rloo-edit", (EDIT, "rl.algorithm=rloo", *GROUPS), shares_sft=False, task="telecom"),
    Run("grpo", ("rl.algorithm=grpo", *GROUPS)),
    Run("grpo-kl-loss", ("rl.algorithm=grpo", "rl.kl_placement=loss", "rl.kl_estimator=k3", *GROUPS)),
    Run("raft", ("rl.algorithm=raft", "rl.ppo_epochs=1", "rl.kl_coef=0.0", "rl.ent_coef=0.0", *GROUPS)),
    Run("ppo-edit-seed-45", ("seed=45", EDIT, *PPO), shares_sft=False, task="appliances"),
)

FAILING = (
    Run("learning-rate-x30", ("rl.learning_rate=0.021",), ("clip", "kl", "entropy", "noise", "repeats", "length", "cut_off", "reward")),
    Run("critic-learning-rate-0", ("rl.critic_learning_rate=1e-12",), ("critic_still",)),
    Run("critic-learning-rate-x100", ("rl.critic_learning_rate=0.1",), ("critic_error", "value_clip")),
    Run("no-kl-learning-rate-x5", ("rl.kl_coef=0.0", "rl.learning_rate=0.0035", *PPO), ("kl", "entropy", "repeats", "noise"), task="telecom"),
    Run("entropy-bonus-x100", ("rl.ent_coef=0.3",), ("noise",)),
    Run("constant-reward", (f"plugins.rewards=[{NO_SCORES}]",), ("scores",)),
    Run("length-reward", (f"plugins.rewards=[{LENGTH_HOLE}]",), ("length", "cut_off")),
    Run("brevity-outweighs", (f"plugins.rewards=[{plugin(COMPETITION)}, {BREVITY}]", "rl.algorithm=rloo", *GROUPS), ("quality", "length")),
    Run("4-new-tokens", ("rl.max_new_tokens=4",), ("cut_off",)),
    Run("temperature-0.02", ("rl.algorithm=grpo", "rl.temperature=0.02", *GROUPS), ("groups",)),
    Run("untrained-base", (), ("sft_noise",), shares_sft=False, untrained=True),
    Run("edit-without-sft", (EDIT, "sft.max_steps=1"), ("sft_noise",), shares_sft=False),
    Run("prompt-in-english-without-sft", (ENGLISH_PROMPT, "sft.max_steps=1"), ("sft_noise",), shares_sft=False),
    Run("retrieval-finds-nothing", ("retrieval.score_threshold=1.0", "plugins.filters=[]"), ("no_hits",), shares_sft=False),
    Run("8-training-queries", ("data.split=[0.016, 0.2, 0.784]",), ("few_rows", "overfit"), shares_sft=False),
)


class Program:
    """Calls querl; knows the folder of its output."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.querl = str(options.querl.resolve())
        self.runs: Path = options.runs.resolve()
        self.tasks: Path | None = options.tasks and options.tasks.resolve()
        self.threads = options.threads or max(1, (os.cpu_count() or 1) // options.jobs)
        self.settings = tuple(options.set)

    def call(self, log: Path, *arguments: str) -> int:
        """Returns the exit code; stdout and stderr are appended to `log`."""
        with log.open("a", encoding="utf-8") as file:
            return subprocess.run([self.querl, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file).returncode

    def train(self, config: Path, folder: Path, last: str, settings: tuple[str, ...]) -> int:
        flags = [part for setting in (*self.settings, *settings) for part in ("--set", setting)]
        common = ["--out", str(folder), "--to", last, "--threads", str(self.threads), "--accept-plugin-change"]
        return self.call(folder.with_name(f"{folder.name}.log"), "run", str(config), *common, *flags)

    def shared_sft(self) -> Path:
        folder = self.runs / "sft"
        if self.train(EXAMPLE, folder, "sft", ()) != 0:
            sys.exit(f"the shared SFT run ends with an error; {folder}.log has it")
        return folder

    def untrained_base(self) -> Path:
        """A model of the example's shape after 5 steps of pretraining."""
        folder = self.runs / "untrained"
        if not (folder / "model/model.safetensors").exists():
            folder.mkdir(exist_ok=True)
            text = (ROOT / "examples/tiny-qwen3/pretrain.toml").read_text(encoding="utf-8")
            text = text.replace('output_dir = "."', 'output_dir = "model"').replace("epochs = 2", "epochs = 2\nmax_steps = 5")
            (folder / "pretrain.toml").write_text(text, encoding="utf-8")
            log = self.runs / "untrained.log"
            code = self.call(log, "model", "corpus", str(EXAMPLE), "--out", str(folder / "corpus.jsonl"), "--lines", "600")
            if code != 0 or self.call(log, "model", "pretrain", str(folder / "pretrain.toml")) != 0:
                sys.exit(f"no model was made; {log} has the error")
        return folder / "model"

    def config(self, run: Run) -> Path:
        """The configuration of the task if its data and its model exist, otherwise of the example."""
        task = self.tasks / run.task if self.tasks and run.task else None
        has_task = task and (task / "querl.toml").exists() and (task / "model/model.safetensors").exists()
        return task / "querl.toml" if task and has_task else EXAMPLE

    def result(self, run: Run) -> Result:
        """Trains if that is not finished, and reads the warnings."""
        config, folder = self.config(run), self.runs / run.name
        state_file, log = self.runs / f"{run.name}.json", self.runs / f"{run.name}.log"
        settings = run.settings
        if run.untrained:
            settings += (f"model.path={json.dumps(str(self.untrained_base()))}",)
        inputs = {"config": str(config), "settings": [*self.settings, *settings]}
        state = json.loads(state_file.read_text(encoding="utf-8")) if state_file.exists() else {}
        if state.get("inputs") != inputs:
            shutil.rmtree(folder, ignore_errors=True)
            log.unlink(missing_ok=True)
            state = {"inputs": inputs, "exit_code": None}
            state_file.write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
        # Other exit codes are interrupts, invalid settings, and failures whose cause may be removed since.
        if state["exit_code"] not in (0, 3):
            if run.shares_sft and config == EXAMPLE and not folder.exists():
                shutil.copytree(self.runs / "sft", folder)
            state["exit_code"] = self.train(config, folder, "rl", settings)
            state_file.write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        warnings = read_warnings(lines)
        last = lines[-1] if lines else f"exit code {state['exit_code']}"
        is_stopped = state["exit_code"] == 3 or (state["exit_code"] == 1 and NOT_FINITE.search(last) is not None)
        if is_stopped and "sft_noise" not in warnings:
            warnings.setdefault(STOPPED, None)
        problem = "" if is_stopped or state["exit_code"] == 0 else last
        return Result(run, warnings, problem)


def read_warnings(lines: list[str]) -> dict[str, int | None]:
    """Kinds of warnings with their first steps. The kind of an unknown warning is its text."""
    found: dict[str, int | None] = {}
    phrases = {**RL_WARNINGS, **OTHER_WARNINGS}
    for line in lines:
        is_noise = line.startswith("error:") and OTHER_WARNINGS["sft_noise"] in line
        if "warning: " not in line and not is_noise:
            continue
        kind = next((kind for kind, phrase in phrases.items() if phrase in line), line.split("warning: ")[-1][:60])
        step = re.search(r"rl step (\d+): warning", line)
        found.setdefault(kind, int(step[1]) if step else None)
    return found


def steps(values: list[int | None]) -> str:
    """Median and range."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "before RL" if values else ""
    return f"{statistics.median_low(known)} ({known[0]} to {known[-1]})" if len(known) > 1 else str(known[0])


def kinds_table(results: list[Result]) -> Iterator[str]:
    yield "| warning | runs that should have it | hits | first step of the hits | other failing runs with it | false alarms |"
    yield "|---|---|---|---|---|---|"
    known = [*RL_WARNINGS, *OTHER_WARNINGS, STOPPED]
    unknown = sorted({kind for result in results for kind in result.warnings} - set(known))
    for kind in known + unknown:
        has_it = [result for result in results if kind in result.warnings]
        planted = [result for result in results if kind in result.run.expected]
        hits = [result for result in has_it if kind in result.run.expected]
        others = [result for result in has_it if result.run.expected and kind not in result.run.expected]
        alarms = [result for result in has_it if not result.run.expected]
        if not planted and not has_it:
            continue
        first = steps([result.warnings[kind] for result in hits])
        yield f"| `{kind}` | {len(planted)} | {len(hits)} | {first} | {len(others)} | {len(alarms)} |"


def runs_table(results: list[Result]) -> Iterator[str]:
    yield "| run | expected, one of | warnings, with step |"
    yield "|---|---|---|"
    for result in results:
        given = [f"{kind} {step}" if step is not None else kind for kind, step in result.warnings.items()]
        name = f"{result.run.name} (did not work)" if result.problem else result.run.name
        yield f"| {name} | {', '.join(result.run.expected) or 'none'} | {', '.join(given) or 'none'} |"


def summary(results: list[Result]) -> tuple[str, bool]:
    """A sentence, and True if all runs are as expected."""
    worked = [result for result in results if not result.problem]
    failing = [result for result in worked if result.run.expected]
    healthy = [result for result in worked if not result.run.expected]
    hits = [result for result in failing if set(result.run.expected) & set(result.warnings)]
    alarms = [result for result in healthy if result.warnings]
    text = f"{len(hits)} of {len(failing)} runs that were made to fail have one of their warnings; {len(alarms)} of {len(healthy)} healthy runs have a warning."
    return text, len(hits) == len(failing) and not alarms and len(worked) == len(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/health"), help="folder of the runs")
    parser.add_argument("--out", type=Path, help="file for the tables, in Markdown")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=0, help="worker threads of each [default: cores / jobs]")
    parser.add_argument("--only", default="", metavar="PATTERN", help="runs whose name has this regular expression")
    parser.add_argument("--tasks", type=Path, help="folder that tests/tasks/run.py --out wrote")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs, such as device=cuda:0 and model.dtype=bf16")
    parser.add_argument("--querl", type=Path, default=ROOT / "target/release/querl")
    parser.add_argument("--list", action="store_true", help="print the runs with their settings, and end")
    options = parser.parse_args()
    runs = [run for run in (*HEALTHY, *FAILING) if re.search(options.only, run.name)]
    if not runs or options.jobs < 1:
        parser.error("--jobs must be 1 or more, and --only must match a run; --list prints their names")
    if options.list:
        for run in runs:
            print(f"{run.name}\n  expected: {', '.join(run.expected) or 'none'}\n  {' '.join(run.settings) or 'as the example'}")
        return 0
    source = HEALTH.read_text(encoding="utf-8")
    unknown = [kind for kind, phrase in RL_WARNINGS.items() if phrase not in source or f'"{kind}"' not in source]
    if unknown:
        sys.exit(f"{HEALTH} has no such warnings: {', '.join(unknown)}; update RL_WARNINGS in this script")
    options.runs.mkdir(parents=True, exist_ok=True)
    program = Program(options)
    if any(run.shares_sft and program.config(run) == EXAMPLE for run in runs):
        program.shared_sft()
    with ThreadPoolExecutor(options.jobs) as pool:
        results = []
        for result in pool.map(program.result, runs):
            print(f"{result.run.name}: {result.problem or ', '.join(result.warnings) or 'no warning'}", flush=True)
            results.append(result)
    sentence, is_good = summary(results)
    tables = "\n".join([*kinds_table(results), "", *runs_table(results), "", sentence])
    print(f"\n{tables}")
    if options.out:
        options.out.write_text(f"{tables}\n", encoding="utf-8")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
