"""Reads the event files of a run with the tensorboard package and compares them with metrics.jsonl.

    python tensorboard_readback.py RUN_FOLDER [--wandb FOLDER]

Every value of metrics.jsonl must occur once, at its step, with the precision of float32. With `--wandb` the same values are then written as
an offline W&B run under FOLDER, which `wandb sync` can upload.
Needs: pip install tensorboard==2.21.0 (and wandb==0.31.0 for `--wandb`).
"""

import argparse
import json
import math
import struct
from collections import defaultdict
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read_events(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def as_float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def expected(run, stage):
    figures = defaultdict(list)
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(line)
        if line.pop("stage") != stage:
            continue
        step = line.pop("step")
        for name, value in line.items():
            if value is not None and math.isfinite(value):
                figures[name].append((step, as_float32(value)))
    return dict(figures)


def write_wandb(run, folder):
    import wandb

    with wandb.init(project="querl", name=run.name, mode="offline", dir=folder) as session:
        for stage in sorted(p.name for p in (run / "tensorboard").iterdir()):
            session.define_metric(f"{stage}/step")
            session.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            by_step = defaultdict(dict)
            for tag, values in read_events(run / "tensorboard" / stage).items():
                for step, value in values:
                    by_step[step][f"{stage}/{tag}"] = value
            for step in sorted(by_step):
                session.log({**by_step[step], f"{stage}/step": step})
    print("W&B:", *sorted(p.name for p in Path(folder).glob("wandb/offline-run-*/*.wandb")))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--wandb", metavar="FOLDER")
    arguments = parser.parse_args()
    for folder in sorted((arguments.run / "tensorboard").iterdir()):
        found, wanted = read_events(folder), expected(arguments.run, folder.name)
        assert found == wanted, f"{folder}: differs from metrics.jsonl"
        print(f"{folder.name}: {len(found)} figures, {sum(map(len, found.values()))} values, as in metrics.jsonl")
    if arguments.wandb:
        write_wandb(arguments.run, arguments.wandb)


if __name__ == "__main__":
    main()
