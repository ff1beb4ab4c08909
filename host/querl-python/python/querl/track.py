"""`python -m querl.track RUN_DIR --to TRACKER`: mirrors a run to an experiment tracker. `querl track` runs it.

Exit codes are those of querl: 0 for success, 1 if the tracker failed, 2 for a usage or configuration error, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

from .tracking import TRACKERS, Mirror, TrackingError


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if args.follow and hasattr(os, "nice"):
        os.nice(10)  # training comes first
    try:
        # Tracker libraries print to stdout, which is reserved for the result.
        with contextlib.redirect_stdout(sys.stderr):
            text = _mirror(args, stop)
    except TrackingError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    print(text)
    return 130 if stop.is_set() else 0


def _mirror(args: argparse.Namespace, stop: threading.Event) -> str:
    mirror = Mirror(args.directory, args.to, args.project, args.name, offline=args.offline, n_samples=args.samples)
    if not mirror.begin(stop, wait=args.follow):
        return f"{args.directory}: interrupted before the mirroring began"
    try:
        mirror.mirror(stop, follow=args.follow)
    except BaseException:
        with contextlib.suppress(TrackingError):
            mirror.close()
        raise
    mirror.close()
    known = "nothing new" if mirror.n_logged == 0 else f"{mirror.n_logged} new records"
    run = f"run {mirror.state.id} of project {args.project}" if mirror.state.id else "no run"
    return f"{args.to}: {known}; {run} has {mirror.state.position.n_records} records of {args.directory}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m querl.track", description="Mirrors a run to an experiment tracker.")
    parser.add_argument("directory", metavar="RUN_DIR", type=_run_directory)
    parser.add_argument("--to", required=True, choices=TRACKERS)
    parser.add_argument("--project", default="querl")
    parser.add_argument("--name", help="name of the run there [default: that of the run directory]")
    parser.add_argument("--follow", action="store_true", help="until no querl process works in the run directory")
    parser.add_argument("--offline", action="store_true", help="keep the records on this machine")
    parser.add_argument(
        "--samples", metavar="N", type=int, default=8, help="validation queries whose rewrites are recorded at each evaluation"
    )
    return parser


def _run_directory(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return Path(text)


if __name__ == "__main__":
    sys.exit(main())
