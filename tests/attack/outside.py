#!/usr/bin/env python3
"""Attacks on the built program through its command line. Prints a Markdown table of groups: tried, held.

    cargo build --release && tests/attack/outside.py [--list] [--long] [GROUP...]

GROUP is a part of a group's name. QUERL=PATH selects another program. `--long` multiplies the number of kills and interrupts by ten. Needs
Python 3.11 or later. Attacks that need another tool (LibreOffice, openssl, node, the packages datasets and pandas) are skipped with a line on
stderr if it is missing. Exit code 1 if an attack did not hold.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import inputs, plugins, results, services, system  # noqa: E402


class Tally:
    """The attacks of one group. `problem` is None if the attack held."""

    def __init__(self, factor: int):
        self.factor, self.n_tried, self.n_held = factor, 0, 0

    def attack(self, name: str, problem: str | None) -> None:
        self.n_tried += 1
        self.n_held += problem is None
        if problem is not None:
            print(f"  did not hold: {name}: {problem}", file=sys.stderr)

    def skip(self, name: str, reason: str) -> None:
        print(f"  skipped: {name}: {reason}", file=sys.stderr)


def main() -> int:
    flags = {argument for argument in sys.argv[1:] if argument.startswith("--")}
    wanted = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if flags - {"--list", "--long"}:
        print(__doc__, file=sys.stderr)
        return 2
    groups = {name: attacks for module in (results, system, inputs, services, plugins) for name, attacks in module.GROUPS.items()}
    chosen = {name: attacks for name, attacks in groups.items() if not wanted or any(part in name for part in wanted)}
    if "--list" in flags:
        print("\n".join(chosen))
        return 0
    n_tried = n_held = 0
    print("| group, from outside | tried | held |\n| --- | --- | --- |")
    for name, attacks in chosen.items():
        tally = Tally(10 if "--long" in flags else 1)
        for attack in attacks:
            try:
                attack(tally)
            except Exception:  # noqa: BLE001: an attack that raises an exception did not hold
                tally.attack(attack.__name__, traceback.format_exc(limit=-3))
        print(f"| {name} | {tally.n_tried} | {tally.n_held} |", flush=True)
        n_tried, n_held = n_tried + tally.n_tried, n_held + tally.n_held
    print(f"\n{n_tried} tried, {n_held} held")
    return int(n_tried != n_held)


if __name__ == "__main__":
    sys.exit(main())
