"""What the author of a querl plugin in Python needs: a class for each kind of plugin, plain types, and one call to export them.

In: an author's class derived from :class:`Reward`, :class:`Filter`, :class:`Prompt` or :class:`StyleScorer`. Out, through
``querl plugin build``: a WebAssembly component for the contract ``querl:plugin@0.1.0``. The logic runs in plain Python too, so
that tests need no WebAssembly. This package has no dependencies and must not depend on the host, files, network and models.
"""

from . import log
from .filter import Filter, Sample
from .prompt import Prompt, PromptInput, PromptTask
from .registry import export
from .reward import Episode, Reward, Score
from .settings import SettingError, Settings
from .style import ClassifyError, Dialogue, StyleModel, StyleScorer
from .types import (
    CallFailure,
    Candidate,
    Context,
    FailureKind,
    Hit,
    JudgeScore,
    Message,
    Rejection,
    Role,
    StyleProbability,
)

__version__ = "0.1.0"

__all__ = [
    "CallFailure",
    "Candidate",
    "ClassifyError",
    "Context",
    "Dialogue",
    "Episode",
    "FailureKind",
    "Filter",
    "Hit",
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
    "log",
]
