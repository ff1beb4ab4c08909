"""Test kit for plugins in plain Python: builders for episodes, golden cases, and checks of the contract.

    from querl_sdk.testing import candidate, check_contract, check_golden, episode
"""

from .builders import candidate, declared, dialogue, episode, failed, hits, host_functions, sample, style_model
from .contract import check_contract
from .golden import GoldenCase, check_golden, read_golden
from .json_form import read_episodes

__all__ = [
    "GoldenCase",
    "candidate",
    "check_contract",
    "check_golden",
    "declared",
    "dialogue",
    "episode",
    "failed",
    "hits",
    "host_functions",
    "read_episodes",
    "read_golden",
    "sample",
    "style_model",
]
