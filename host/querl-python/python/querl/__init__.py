"""querl in Python: reward plugins and the RL environment of a configuration, for other training engines.

    import querl
    scorer = querl.load("querl.toml")
    results = scorer.score([{"query": {"query": "一天几粒啊"}, "response": "深海鱼油软胶囊 食用方法"}])

`querl.integrations` has reward functions for TRL, verl, ms-swift, verifiers and OpenRLHF (docs/engines.md).
`querl.tracking` mirrors runs to experiment trackers (docs/tracking.md).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

try:
    from . import _program
    from ._errors import SampleRejected
    from ._objects import Filter, Reward, Scorer, StyleScorer
    from ._querl import PluginFault, Prompt, QuerlError, Rejection, Score, __version__, load_config, set_program
    from ._rows import rows
    from .run import Run

    # The `querl` program compiles plugins in a subprocess. The default is the current executable, which is the Python interpreter here.
    set_program(_program.program())
except ModuleNotFoundError as error:
    # `querl.tracking` also works from a source checkout, where the extension module is not built.
    if error.name != f"{__name__}._querl":
        raise
    _missing = error
    if not TYPE_CHECKING:

        def __getattr__(name: str) -> Any:
            if name in __all__:
                raise _missing
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Filter",
    "PluginFault",
    "Prompt",
    "QuerlError",
    "Rejection",
    "Reward",
    "Run",
    "SampleRejected",
    "Score",
    "Scorer",
    "StyleScorer",
    "__version__",
    "load",
    "load_config",
    "rows",
]


def load(config: str | os.PathLike[str], overrides: list[str] | None = None) -> Scorer:
    """Opens the `Scorer` of a `querl.toml` or a run directory. `overrides` are `KEY=VALUE`, as for `--set` of the command line."""
    return Scorer(config, overrides)
