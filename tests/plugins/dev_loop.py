#!/usr/bin/env python3
"""Seconds from a save to the output of `querl plugin dev`, for 1,000 recorded episodes, in each language.

    tests/plugins/dev_loop.py [LANGUAGE...]

Makes a reward with `querl plugin new`, starts `querl plugin dev` without the component, saves a changed source SAVES times (5), and measures
the time until the scores are printed. The tests of one save end before the next save. Needs the program (`cargo build --release`, or
QUERL=path of another), python3, node and cargo.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUERL = os.environ.get("QUERL", str(ROOT / "target/release/querl"))
SAVES = int(os.environ.get("SAVES", "5"))
N_EPISODES = 1000
SOURCES = {"rust": "src/lib.rs", "python": "plugin.py", "javascript": "plugin.js"}


def write_episodes(path: Path) -> None:
    """The episodes of the example, repeated with other ids."""
    lines = (ROOT / "examples/hello-reward/episodes.jsonl").read_text(encoding="utf-8").splitlines()
    with path.open("w", encoding="utf-8") as file:
        for index in range(N_EPISODES):
            line = json.loads(lines[index % len(lines)])
            line["episode"]["id"] = f"repeat-{index // len(lines)}/{line['episode']['id']}"
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def seconds_of_saves(folder: Path, source: Path, episodes: Path) -> list[float]:
    """One time per save."""
    text = source.read_text(encoding="utf-8")
    command = [QUERL, "plugin", "dev", str(folder), "--episodes", str(episodes), "--no-component", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as dev:
        lines = iter(dev.stdout)

        def wait_for(*starts: str) -> str:
            line = next((line for line in lines if line.startswith(starts)), None)
            return line or sys.exit(f"{folder.name}: `querl plugin dev` ended")

        wait_for("tests ")
        seconds = []
        for save in range(SAVES):
            source.write_text(text.replace('"max_chars", 40', f'"max_chars", {41 + save}'), encoding="utf-8")
            started = time.perf_counter()
            wait_for(f"{folder.name} ")
            seconds.append(time.perf_counter() - started)
            shown = wait_for("scored ", "cannot be run")
            if shown.split()[:2] != ["scored", str(N_EPISODES)]:
                sys.exit(f"{folder.name}: {shown}")
            wait_for("tests ")
        dev.terminate()
    return seconds


def main(languages: list[str]) -> None:
    """Prints a line for each language."""
    with tempfile.TemporaryDirectory() as scratch:
        episodes = Path(scratch, "episodes.jsonl")
        write_episodes(episodes)
        for language in languages or SOURCES:
            folder = Path(scratch, f"loop-{language}")
            new = [QUERL, "plugin", "new", folder.name, "--kind", "reward", "--lang", language, "--dir", scratch]
            subprocess.run(new, check=True, stdout=subprocess.DEVNULL)
            seconds = seconds_of_saves(folder, folder / SOURCES[language], episodes)
            each = ", ".join(f"{one:.2f}" for one in sorted(seconds))
            print(f"{language:10}  median {statistics.median(seconds):.2f} s of {len(seconds)} saves: {each}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
