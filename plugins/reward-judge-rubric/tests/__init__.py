"""Tests of the plugin: run `python3 -m unittest` in its folder. Adds the repository's SDK to the import path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "sdk" / "python"))
