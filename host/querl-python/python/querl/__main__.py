"""`querl` and `python -m querl`: the program of the command line, which is in this package."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ._program import program


def main() -> NoReturn:
    path = program()
    if path is None:
        sys.exit("querl: this package was built without the program `querl/bin/querl`; name one with QUERL_PROGRAM")
    os.execv(path, [str(path), *sys.argv[1:]])


if __name__ == "__main__":
    main()
