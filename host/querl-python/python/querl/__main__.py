"""`querl` and `python -m querl`: replaces this process with the native `querl` program."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ._program import check, program
from ._querl import QuerlError


def main() -> NoReturn:
    path = program()
    try:
        check(path)
    except QuerlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    # `querl track` starts `$PYTHON`: the interpreter where this package is installed.
    os.environ.setdefault("PYTHON", sys.executable)
    os.execv(path, [str(path), *sys.argv[1:]])


if __name__ == "__main__":
    main()
