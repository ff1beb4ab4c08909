"""`python3 -m unittest` in the plugin's folder, with the SDK from `vendor`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "vendor"))
