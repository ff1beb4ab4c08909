#!/usr/bin/env python3
"""Trains on the tasks of this folder and on examples/appliances, and prints RL compared with SFT, the raw query and the teacher.

    tests/tasks/run.py --out runs/tasks [--tasks telecom appliances] [--seeds 42 43] [--set rl.max_steps=40]

Each task: a small model is pretrained on a corpus of the knowledge base alone (`querl model corpus`, `querl model pretrain`; appliances has one), then
`querl run` with the defaults for a model of that size. `queries.jsonl` contains the query table and the recorded teacher.

`NAME-semantic` is the task NAME with hybrid retrieval: BM25 and an embedding model of the knowledge base made by encoder.py, as the embedded
index combines them. To use another embedding model, put it at OUT/NAME-semantic/encoder before.
`NAME-blind` is the task NAME with the rewrites of a teacher that did not see the knowledge base (blind/NAME.jsonl).
Needs only Python 3, for the semantic tasks one with torch and transformers; no network. Finished parts are not repeated.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# The language of the prompt: plugins/prompt-rewrite has Chinese and English.
LANGUAGES = {
    "telecom": "zh",
    "encyclopedia": "zh",
    "appliances": "en",
    "claims": "en",
    "ferries": "en",
    "ferries_2000": "en",
    "buergerservice": "en",
    "service_desk": "zh",
    "energy": "en",
    "campus": "en",
    "insurance": "en",
    "hospital": "en",
    "factory": "en",
    "factory_2400": "en",
}
DOMAINS = {
    "telecom": "通信服务",
    "encyclopedia": "百科",
    "appliances": "household appliances",
    "claims": "science",
    "ferries": "ferries",
    "buergerservice": "city administration",
    "ferries_2000": "ferries",
    "service_desk": "公司内部服务台",
    "energy": "energy cooperative",
    "campus": "university services",
    "insurance": "insurance",
    "hospital": "hospital intranet",
    "factory": "intranet of an engineering company",
    "factory_2400": "intranet of an engineering company",
}
# Tasks with the knowledge base and the base model of another. Their queries have a column `group`, so that queries of test may ask for passages
# that queries of train ask for; without it, rows with the same gold passage are in one split.
KNOWLEDGE_BASES = {"ferries_2000": "ferries", "factory_2400": "factory"}

CONFIG = """tenant = "{name}"
device = "cpu"
output_dir = "run"

[data]
input = "{task}/queries.jsonl"
split = [0.6, 0.15, 0.25]
{group}
[teacher]
kind = "recorded"
path = "{teacher}"

[retrieval]
kind = "embedded"
knowledge_base = "{knowledge}/knowledge_base.jsonl"

[model]
path = "{model}"

[plugins]
prompt = {{ path = "{root}/plugins/prompt-rewrite", settings = {{ language = "{language}", domain = "{domain}" }} }}
filters = [{{ path = "{root}/plugins/filter-quality" }}]
rewards = [{{ path = "{root}/plugins/reward-competition" }}]
"""
SEMANTIC = """
[retrieval.embedding]
kind = "local"
path = "encoder"
"""


def prepare(name, out, querl):
    """Writes the configuration of a task, and makes the models that it names if they do not exist."""
    queries = name.removesuffix("-semantic").removesuffix("-blind")
    base = KNOWLEDGE_BASES.get(queries, queries)
    folder, small = out / name, out / base
    for path in (folder, small):
        path.mkdir(parents=True, exist_ok=True)
    task, knowledge = (ROOT / "examples/appliances" if part == "appliances" else HERE / part for part in (queries, base))
    model = (knowledge if base == "appliances" else small) / "model"
    teacher = HERE / "blind" / f"{queries}.jsonl" if name.endswith("-blind") else task / "queries.jsonl"
    group = 'group_column = "group"\n' if base != queries else ""
    config = CONFIG.format(
        name=name,
        model=model,
        task=task,
        teacher=teacher,
        knowledge=knowledge,
        group=group,
        root=ROOT,
        language=LANGUAGES[queries],
        domain=DOMAINS[queries],
    )
    is_semantic = name.endswith("-semantic")
    (folder / "querl.toml").write_text(config + SEMANTIC if is_semantic else config)
    if is_semantic and not (folder / "encoder/model.safetensors").exists():
        call(sys.executable, HERE / "encoder.py", knowledge / "knowledge_base.jsonl", folder / "encoder")
    if base != "appliances" and not (model / "model.safetensors").exists():
        files = ["--out", small / "corpus.jsonl", "--pretrain", small / "pretrain.toml", "--out_model", model]
        call(querl, "model", "corpus", folder / "querl.toml", *files)
        call(querl, "model", "pretrain", small / "pretrain.toml")
    return folder


def call(*command):
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    blind = [f"{path.stem}-blind" for path in sorted((HERE / "blind").glob("*.jsonl"))]
    choices = [*LANGUAGES, *blind, *(f"{name}-semantic" for name in LANGUAGES)]
    parser.add_argument("--tasks", nargs="+", default=list(LANGUAGES), choices=choices)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--label", default="run", help="name of the run directories, for runs with other --set")
    parser.add_argument("--querl", type=Path, default=ROOT / "target/release/querl")
    args = parser.parse_args()
    pairs = ["rl-sft", "rl-raw", "rl-with_history", "rl-expanded", "rl-teacher", "sft-raw", "expanded-raw"]
    lines = []
    for name in args.tasks:
        folder = prepare(name, args.out.resolve(), args.querl)
        runs = []
        for seed in args.seeds:
            run = folder / f"{args.label}-{seed}"
            settings = [part for value in [f"seed={seed}", *args.set] for part in ("--set", value)]
            call(args.querl, "-q", "run", folder / "querl.toml", "--out", run, *settings)
            runs.append(run)
        printed = subprocess.run([args.querl, "report", "--json", *runs], check=True, capture_output=True, text=True)
        result = json.loads(printed.stdout)
        result = result.get("pooled", result)  # the result of several runs
        systems = {system: measures["top1"]["mean"] for system, measures in result["systems"].items()}
        differences = {pair: result["pairs"].get(pair, {}).get("top1") for pair in pairs}
        lines.append((name, systems, differences))
    print()
    for name, systems, differences in lines:
        print(name, "top-1 %:", ", ".join(f"{system} {100 * value:.1f}" for system, value in systems.items()))
        for pair, value in differences.items():
            if value:
                print(f"  {pair:12} {100 * value['mean']:+.1f} [{100 * value['low']:+.1f}, {100 * value['high']:+.1f}]")


if __name__ == "__main__":
    main()
