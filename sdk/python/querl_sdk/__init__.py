"""SDK for querl plugins in Python: a base class for each kind of plugin, data types, and :func:`export`.

Derive a class from :class:`Reward`, :class:`GroupReward`, :class:`Filter`, :class:`Prompt` or :class:`StyleScorer`. ``querl plugin build``
makes a WebAssembly component of it for the contract ``querl:plugin@0.2.0``. The same class runs in plain Python, so that tests
need no WebAssembly. This package has no dependencies and must not depend on the host, files, network and models.
"""

from . import host, log, text
from .filter import Filter, Sample
from .host import HostCallError
from .prompt import Prompt, PromptInput, PromptTask
from .registry import export
from .reward import GroupReward, Reward, Score
from .settings import SettingError, Settings
from .style import Dialogue, StyleModel, StyleScorer
from .types import (
    CallFailure,
    Candidate,
    ColumnValue,
    Context,
    Episode,
    FailureKind,
    Hit,
    JudgeScore,
    Message,
    Rejection,
    Role,
    StyleProbability,
)

__version__ = "0.2.0"

__all__ = [
    "CallFailure",
    "Candidate",
    "ColumnValue",
    "Context",
    "Dialogue",
    "Episode",
    "FailureKind",
    "Filter",
    "GroupReward",
    "Hit",
    "HostCallError",
    "JudgeScore",
    "Message",
    "Prompt",
    "PromptInput",
    "PromptTask",
    "Rejection",
    "Reward",
    "Role",
    "Sample",
    "Score",
    "SettingError",
    "Settings",
    "StyleModel",
    "StyleProbability",
    "StyleScorer",
    "export",
    "host",
    "log",
    "text",
]
