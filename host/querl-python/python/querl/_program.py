"""Where the `querl` program is."""

from __future__ import annotations

import os
from pathlib import Path


def program() -> Path | None:
    """`$QUERL_PROGRAM`, else the program in this package; None where there is none."""
    named = os.environ.get("QUERL_PROGRAM")
    path = Path(named) if named else Path(__file__).parent / "bin" / "querl"
    return path if path.is_file() else None
