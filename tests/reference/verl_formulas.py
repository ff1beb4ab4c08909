"""verl's own `core_algos` and `torch_functional`, imported from the installed package without its cluster stack.

`import verl` imports ray and more, which the formulas do not use. The modules named in `ABSENT` are replaced by
empty ones, and `verl/__init__.py` is skipped; every formula that is called is the installed file's.
"""

import importlib.util
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import common  # noqa: F401  (sets the environment before torch is loaded)

ABSENT = ["ray"]


def _import():
    root = Path(importlib.util.find_spec("torch").origin).parents[1] / "verl"
    package = types.ModuleType("verl")
    package.__path__ = [str(root)]
    package.__version__ = (root / "version" / "version").read_text().strip()
    sys.modules["verl"] = package
    for name in ABSENT:
        sys.modules[name] = MagicMock(name=name, __spec__=None)
    import verl.trainer.ppo.core_algos as core_algos
    import verl.trainer.ppo.rollout_corr_helper as rollout_corr_helper
    import verl.utils.torch_functional as torch_functional

    return core_algos, rollout_corr_helper, torch_functional, package.__version__


core_algos, rollout_corr_helper, torch_functional, VERSION = _import()
