"""Locates the native `querl` program."""

from __future__ import annotations

import os
from pathlib import Path

from ._querl import QuerlError


def program() -> Path:
    """Path of the program: `$QUERL_PROGRAM`, else the file in this package, else the first one in `$PATH`.

    If there is none, the path in this package, for the error message of `check`.
    """
    packaged = Path(__file__).parent / "bin" / "querl"
    named = os.environ.get("QUERL_PROGRAM")
    if named:
        return Path(named)
    folders = [] if packaged.is_file() else os.environ.get("PATH", os.defpath).split(os.pathsep)
    return next((path for folder in folders if is_native(path := Path(folder or ".") / "querl")), packaged)


# ELF; 64-bit Mach-O; universal Mach-O.
MAGIC = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


def is_native(path: Path) -> bool:
    """True for an executable in machine code. Excludes this package's console script, which has the same name and starts `program()`."""
    try:
        with path.open("rb") as file:
            return file.read(4).startswith(MAGIC) and os.access(path, os.X_OK)
    except OSError:
        return False


def check(path: Path) -> None:
    """Raises QuerlError if the program does not exist."""
    if not path.is_file():
        source = "QUERL_PROGRAM" if os.environ.get("QUERL_PROGRAM") else "this package was built without it"
        raise QuerlError(
            f"{path}: no such program ({source}); build it with `cargo build --release`, and put its folder into PATH or name it with the "
            "environment variable QUERL_PROGRAM"
        )
