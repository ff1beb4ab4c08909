"""Debug log: to querl's log (``-v``) in a component, to stderr natively. It has no effect on results."""

from __future__ import annotations

import sys
from collections.abc import Callable


def debug(message: str) -> None:
    """Writes a line of level debug."""
    _write("debug", message)


def info(message: str) -> None:
    """Writes a line of level info."""
    _write("info", message)


def warn(message: str) -> None:
    """Writes a line of level warn."""
    _write("warn", message)


def error(message: str) -> None:
    """Writes a line of level error."""
    _write("error", message)


def _to_stderr(level: str, message: str) -> None:
    print(f"{level}: {message}", file=sys.stderr)


_write: Callable[[str, str], None] = _to_stderr


def _send_to(write: Callable[[str, str], None]) -> None:
    """Replaces the receiver of log lines."""
    global _write
    _write = write
