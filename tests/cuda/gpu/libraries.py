#!/usr/bin/env python3
"""Finds CUDA's libraries: prints the folders of the libraries named on the command line as one line for LD_LIBRARY_PATH.

Searched in this order: the loader's default path (nothing is printed for libraries found there), the folders of NVIDIA's wheels (dependencies of
PyTorch), and /usr/local/cuda*. Exits with 1 and a message if a library is missing, or exists only for another CUDA version.
"""

import ctypes
import glob
import os
import re
import sys


def loads(name):
    try:
        ctypes.CDLL(name)
        return True
    except OSError:
        return False


def folders():
    found = []
    for root in sys.path:
        found += glob.glob(os.path.join(root, "nvidia", "*", "lib"))
    return found + sorted(glob.glob("/usr/local/cuda*/lib64") + glob.glob("/usr/local/cuda*/targets/*/lib"))


def main():
    known, needed, problems = folders(), [], []
    for name in sys.argv[1:]:
        if loads(name):
            continue
        where = next((folder for folder in known if os.path.exists(os.path.join(folder, name))), None)
        if where:
            needed.append(where)
            continue
        stem, version = re.fullmatch(r"(.*\.so)\.(\d+)", name).groups()
        others = {os.path.basename(path).rsplit(".", 1)[-1] for folder in known for path in glob.glob(os.path.join(folder, stem + ".*[0-9]"))}
        others = sorted(other for other in others if other.isdigit() and other != version)
        has = f"this machine has {stem}.{others[0]} alone" if others else "this machine has it for no CUDA"
        problems.append(f"{name} is missing: {has}; pack for its CUDA (QUERL_CUDA_INSTALLED, see docs/cuda.md) or install the wheels of CUDA {version}")
    print(":".join(dict.fromkeys(needed)))
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


main()
