"""Finished results: refused commands, damaged files, wrong models, kills and interrupts."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import struct
from pathlib import Path

from project import EXAMPLE, PLUGINS, Project

FAILING_TEMPLATE = "{{ raise_exception('no') }}"


def truncated_model(project: Project) -> list[str]:
    weights = project.copy_model("model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return ["--set", 'model.path="model"']


def not_finite_model(project: Project) -> list[str]:
    weights = project.copy_model("model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + struct.pack("<f", float("nan")))
    return ["--set", 'model.path="model"']


def failing_template(project: Project) -> list[str]:
    (project.copy_model("model") / "chat_template.jinja").write_text(FAILING_TEMPLATE)
    return ["--set", 'model.path="model"']


def truncated_adapter(project: Project) -> list[str]:
    adapter = project.path("run/sft/best/adapter_model.safetensors")
    adapter.write_bytes(adapter.read_bytes()[:100])
    return ["--from", "rl"]


def setting(text: str):
    return lambda _project: ["--set", text]


# An error, and the commands that must refuse it with exit code 2 without changing a file.
REFUSED = [
    ("responses longer than the model", setting("rl.max_new_tokens=100000"), ["run", "rl", "eval"]),
    ("rows longer than sft.max_length", setting("sft.max_length=4"), ["run", "sft"]),
    ("an empty stop string", setting('rl.stop_strings=[""]'), ["run", "rl"]),
    ("a column that is not there", setting("data.query_column=none"), ["run", "rewrite"]),
    ("a learning rate that is no number", setting("rl.learning_rate=nan"), ["run", "rl"]),
    ("a truncated model", truncated_model, ["run", "sft", "rl", "eval"]),
    ("NaN in the weights", not_finite_model, ["run", "sft", "rl", "eval"]),
    ("a failing chat template", failing_template, ["run", "sft", "rl", "eval"]),
    ("a truncated sft/best", truncated_adapter, ["run", "rl"]),
]


def refused_commands(tally) -> None:
    for name, prepare, commands in REFUSED:
        with Project(finished="eval") as project:
            more = prepare(project)
            before = project.snapshot()
            for command in commands:
                problem = project.querl(command, "querl.toml", *more).problem(2)
                changed = {path for path, found in project.snapshot().items() if before.get(path) != found}
                gone = before.keys() - project.snapshot().keys()
                tally.attack(f"{command}: {name}", problem or (f"changed {changed | gone}" if changed | gone else None))


# A file of a finished run, and a command that reads it.
READ = [
    ("data/rewrites.jsonl", ["validate", "querl.toml", "--from", "validate"]),
    ("data/validated.jsonl", ["convert", "querl.toml", "--from", "convert"]),
    ("data/train.jsonl", ["sft", "querl.toml", "--from", "sft"]),
    ("data/test.jsonl", ["eval", "querl.toml", "--from", "eval"]),
    ("sft/best/adapter_config.json", ["rl", "querl.toml", "--from", "rl"]),
    ("sft/best/adapter_model.safetensors", ["eval", "querl.toml", "--from", "eval"]),
    ("rl/best/adapter_config.json", ["eval", "querl.toml", "--from", "eval"]),
    ("rl/best/adapter_model.safetensors", ["eval", "querl.toml", "--from", "eval"]),
    ("eval/records.jsonl", ["report", "run"]),
]
# Files that the command does not need, so that a change is reported in the table.
REPORTED = ["data/rewrites.jsonl", "data/validated.jsonl", "metrics.jsonl", "episodes.jsonl"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "a flipped bit": flip,
}


def damaged_files(tally) -> None:
    with Project(finished="eval") as project:
        attacks = [(name, args, 2) for name, args in READ] + [(name, ["report", "run"], 0) for name in REPORTED]
        for name, args, code in attacks:
            path = project.path(f"run/{name}")
            content = path.read_bytes()
            for damage, damaged in DAMAGES.items():
                damaged(path)
                # The metrics of the damaged line cannot be parsed: an error with the line number.
                unreadable = name == "metrics.jsonl" and damage in ("cut", "a flipped bit")
                end = project.querl(*args)
                said = path.name if code == 2 else name.split("/")[-1]
                problem = end.problem(code, said)
                if problem and unreadable and end.code in (1, 2) and "metrics.jsonl" in end.err:
                    problem = None
                tally.attack(f"{name} {damage}: {args[0]}", problem)
                path.write_bytes(content)


# A file of a model, and damages that change its content.
MODEL_FILES = {
    "config.json": ["missing", "cut", "empty"],
    "tokenizer.json": ["missing", "cut", "empty"],
    "tokenizer_config.json": ["missing", "cut", "empty"],
    "generation_config.json": ["cut", "empty"],
    "chat_template.jinja": ["missing", "cut"],
    "model.safetensors": ["missing", "cut", "empty"],
}


def damaged_models(tally) -> None:
    """Each is reported with a remedy, and cannot be deployed."""
    with Project(finished="convert") as project:
        folder = project.copy_model("model")
        local = ["--set", 'model.path="model"']
        tally.attack("a training", project.querl("run", "querl.toml", "--to", "sft", *local).problem(0))
        for name, damages in MODEL_FILES.items():
            content = (folder / name).read_bytes()
            for damage in damages:
                DAMAGES[damage](folder / name)
                for args in (
                    ["model", "inspect", "model"],
                    ["model", "export", "--model", "model", "--out", "exported"],
                    ["deploy", "run", "--out", "deployed"],
                    ["rl", "querl.toml", *local],
                ):
                    end = project.querl(*args)
                    no_remedy = None if "; " in end.err.rstrip().rsplit("\n", 1)[-1] else f"no remedy: {end.err[-300:]}"
                    tally.attack(f"{name} {damage}: {args[0]} {args[1]}", end.problem(2, name) or no_remedy)
                (folder / name).write_bytes(content)


def without_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def lost_lines(tally) -> None:
    """Logs and splits that can be parsed but have lost lines: every command that reads them reports it."""
    reward = str(PLUGINS / "reward-competition")
    with Project(finished="eval") as project:
        for name, args, code in (
            ("episodes.jsonl", ["report", "run"], 0),
            ("episodes.jsonl", ["audit", "run"], 0),
            ("episodes.jsonl", ["watch", "run", "--once"], 0),
            ("episodes.jsonl", ["plugin", "replay", "run", "--plugin", reward], 0),
            ("metrics.jsonl", ["report", "run"], 0),
            ("metrics.jsonl", ["audit", "run"], 0),
            ("metrics.jsonl", ["watch", "run", "--once"], 0),
            ("data/train.jsonl", ["data", "stats", "querl.toml"], 0),
            ("data/train.jsonl", ["serve", "reward", "run", "--addr", "127.0.0.1:0"], 2),
            ("data/validated.jsonl", ["serve", "reward", "run", "--addr", "127.0.0.1:0"], 2),
            ("eval/records.jsonl", ["serve", "rewrite", "run", "--addr", "127.0.0.1:0"], 2),
            ("eval/records.jsonl", ["deploy", "run", "--out", "deployed"], 2),
        ):
            path = project.path(f"run/{name}")
            content = path.read_bytes()
            without_last_line(path)
            end = project.querl(*args, limit_s=30)
            # `episodes.jsonl of rl has 10 of 20 bytes`, or `run/data/train.jsonl: has 10 of 20 bytes`.
            sentence = rf"{re.escape(path.name)}(:| of \w+) has \d+ of \d+ bytes"
            said = None if re.search(sentence, end.out + end.err) else f"nothing is said of what {name} lost"
            tally.attack(f"{name} without its last line: {' '.join(args[:2])}", end.problem(code) or said)
            path.write_bytes(content)


# Keys of config.json that change the computation.
MODEL_KEYS = [
    {"rope_scaling": {"type": "unheard-of", "factor": 2.0}},
    {"rope_parameters": {"type": "unheard-of"}},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"attention_multiplier": 0.5},
    {"hidden_act": "gelu_new"},
    {"attn_logit_softcapping": 50.0},
    {"head_dim": 7},
    {"num_key_value_heads": 3},
    {"hidden_size": 10**12},
    {"num_hidden_layers": 10**9},
    {"vocab_size": -1},
    {"max_position_embeddings": 0},
    {"rope_theta": "large"},
    {"model_type": "another"},
]


STYLE = [str(EXAMPLE.parent / "style/classifier.toml"), "--train_file", str(EXAMPLE.parent / "style/dialogues.json")]


def changed_models(tally) -> None:
    with Project() as project:
        folder = project.copy_model("model")
        original = json.loads((folder / "config.json").read_text())
        project.write("texts.jsonl", '{"text": "胶原蛋白"}\n')
        for change in MODEL_KEYS:
            (folder / "config.json").write_text(json.dumps(original | change))
            end = project.querl("model", "logprobs", "--model", "model", "--input", "texts.jsonl")
            problem = end.problem(2) or (f"{end.memory_mib:.0f} MiB" if end.memory_mib > 1500 else None)
            tally.attack(f"config.json with {change}", problem)
        (folder / "config.json").write_text(json.dumps(original))
        not_finite_model_of = folder / "model.safetensors"
        for value in ("nan", "inf", "-inf"):
            content = not_finite_model_of.read_bytes()
            not_finite_model_of.write_bytes(content[:-4] + struct.pack("<f", float(value)))
            for args in (
                ["model", "logprobs", "--model", "model", "--input", "texts.jsonl"],
                ["model", "export", "--model", "model", "--out", "exported"],
                ["run", "querl.toml", "--to", "sft", "--set", 'model.path="model"'],
                ["plan", "querl.toml", "--set", 'model.path="model"'],
                ["model", "inspect", "model"],
                ["style", "train", *STYLE, "--model_name_or_path", "model", "--output_dir", "style"],
            ):
                tally.attack(f"{value} in the weights: {' '.join(args[:2])}", project.querl(*args).problem(2, "tensor"))
            not_finite_model_of.write_bytes(content)


TRAINED = ["sft", "rl"]


def trained(project: Project) -> dict[str, str]:
    """Digests of all files of a training, except for logs with times."""
    files: dict[str, str] = {}
    for folder in TRAINED:
        files |= {name: found for name, found in project.snapshot(f"run/{folder}").items() if "tensorboard" not in name}
    return files


def difference(project: Project, expected: dict[str, str]) -> str | None:
    found = trained(project)
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return f"{names} differ from those of a run that was never stopped" if names else None


def kills(tally) -> None:
    """kill -9 at random times of a fine-tuning with the default of save_steps."""
    sets = ["--set", "sft.max_steps=60", "--set", "sft.epochs=60", "--set", "sft.save_interval_s=1", "--set", "rl.max_steps=4"]
    args = ["run", "querl.toml", "--to", "rl", *sets]
    with Project(finished="convert") as whole, Project(finished="convert") as project:
        started = whole.querl(*args)
        assert started.code == 0, started
        numbers, n_killed = random.Random(1), 0
        for _ in range(10 * tally.factor):
            end = project.interrupted(*args, after_s=numbers.uniform(0.3, 0.7 * started.seconds + 1), sent=signal.SIGKILL)
            n_killed += end.code == -9
            tally.attack("kill -9", end.problem(-9) if end.code not in (0, -9) else None)
            if end.code == 0:
                shutil.rmtree(project.path("run"))
                shutil.copytree(Project(finished="convert").path("run"), project.path("run"))
        end = project.querl(*args)
        tally.attack(f"the end after {n_killed} kills", end.problem(0) or difference(project, trained(whole)))


def interrupted_rollouts(tally) -> None:
    """Repeated Ctrl-C within the rollouts of one step, which take far longer than the pause between two interrupts."""
    sets = ["rl.batch_size=8", "rl.n_samples=8", "rl.max_new_tokens=300", "rl.min_new_tokens=300", "rl.eval_steps=100"]
    args = ["rl", "querl.toml", *(word for text in sets for word in ("--set", text))]
    with Project(finished="sft") as whole, Project(finished="sft") as project:
        end = whole.querl(*args, limit_s=1200)
        assert end.code == 0, end
        n_within, pause_s = 0, min(1.5, max(0.7, end.seconds / 12))  # on a fast machine the rollouts of a step take a few seconds
        for _ in range(15 * tally.factor):
            end = project.interrupted(*args, after_s=max(1.0, end.seconds / 20) if n_within == 0 else pause_s)
            if end.code == 0:
                break
            n_within += "the state is saved" in end.err
            tally.attack("Ctrl-C in a rollout", end.problem(130) or (f"{end.seconds:.1f} s" if end.seconds > 10 else None))
        end = project.querl(*args, limit_s=1200)
        few = f"only {n_within} interrupts met a rollout" if n_within < 3 else None
        tally.attack(f"the end after {n_within} interrupts", end.problem(0) or few or difference(project, trained(whole)))


GROUPS = {
    "refused commands": [refused_commands],
    "damaged files of a run": [damaged_files, lost_lines],
    "models": [changed_models, damaged_models],
    "kills and interrupts": [kills, interrupted_rollouts],
}
