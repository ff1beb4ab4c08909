"""querl in Python: reward plugins, and the environment of a configuration, for other training engines.

    import querl
    scorer = querl.load("querl.toml")
    results = scorer.score([{"query": {"query": "一天几粒啊"}, "response": "深海鱼油软胶囊 食用方法"}])

`querl.integrations` has the reward functions of TRL, verl, ms-swift, verifiers and OpenRLHF. docs/engines.md describes
both.
"""

from __future__ import annotations

import os

from ._errors import SampleRejected
from ._objects import Filter, Reward, Scorer, StyleScorer
from ._program import program as _program
from ._querl import PluginFault, Prompt, QuerlError, Rejection, Score, __version__, load_config, set_program
from ._rows import rows
from .run import Run

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

# Plugins are compiled by the program, in a process of its own: this one is Python.
set_program(_program())


def load(config: str | os.PathLike[str], overrides: list[str] | None = None) -> Scorer:
    """Opens services and plugins of a `querl.toml` or a run directory. `overrides` are `KEY=VALUE` as of `--set`."""
    return Scorer(config, overrides)
