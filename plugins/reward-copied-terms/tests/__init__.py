"""`python -m unittest` in the plugin's folder. The SDK is the repository's."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "sdk" / "python"))
