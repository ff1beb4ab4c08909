"""Where the `querl` program is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ._querl import QuerlError


def program() -> Path:
    """`$QUERL_PROGRAM`, else the program in this package, else the one in `$PATH`; that of the package where there is none."""
    packaged = Path(__file__).parent / "bin" / "querl"
    named = os.environ.get("QUERL_PROGRAM")
    if named:
        return Path(named)
    found = None if packaged.is_file() else shutil.which("querl")
    return Path(found) if found else packaged


def check(path: Path) -> None:
    """Raises QuerlError where the program is missing."""
    if not path.is_file():
        source = "QUERL_PROGRAM" if os.environ.get("QUERL_PROGRAM") else "this package was built without it"
        raise QuerlError(f"{path}: no such program ({source}); name the program `querl` with the environment variable QUERL_PROGRAM")
