"""Where the `querl` program is."""

from __future__ import annotations

import os
from pathlib import Path

from ._querl import QuerlError


def program() -> Path:
    """`$QUERL_PROGRAM`, else the program in this package, else the one in `$PATH`; that of the package where there is none."""
    packaged = Path(__file__).parent / "bin" / "querl"
    named = os.environ.get("QUERL_PROGRAM")
    if named:
        return Path(named)
    folders = [] if packaged.is_file() else os.environ.get("PATH", os.defpath).split(os.pathsep)
    return next((path for folder in folders if is_native(path := Path(folder or ".") / "querl")), packaged)


# ELF; Mach-O of 64 bits, and of several architectures.
MAGIC = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


def is_native(path: Path) -> bool:
    """Whether the file is a compiled program: the console script of this package, which starts `program()`, has the same name."""
    try:
        with path.open("rb") as file:
            return file.read(4).startswith(MAGIC) and os.access(path, os.X_OK)
    except OSError:
        return False


def check(path: Path) -> None:
    """Raises QuerlError where the program is missing."""
    if not path.is_file():
        source = "QUERL_PROGRAM" if os.environ.get("QUERL_PROGRAM") else "this package was built without it"
        raise QuerlError(
            f"{path}: no such program ({source}); build it with `cargo build --release`, and put its folder into PATH or name it with the "
            "environment variable QUERL_PROGRAM"
        )
