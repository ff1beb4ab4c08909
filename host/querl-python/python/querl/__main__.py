"""`querl` and `python -m querl`: the program of the command line, which is in this package."""

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
    # Tracking then uses the Python that has this package.
    os.environ.setdefault("PYTHON", sys.executable)
    os.execv(path, [str(path), *sys.argv[1:]])


if __name__ == "__main__":
    main()
