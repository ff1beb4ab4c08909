"""Tests of the plugin in plain Python: run `python3 -m unittest` in its folder. Adds the SDK in `vendor` to the import path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "vendor"))
