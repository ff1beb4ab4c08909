"""The extension module: plugins, and the environment of a configuration. All objects can be used from any thread."""

import os
from typing import Any, Literal

__version__: str

_Path = str | os.PathLike[str]

class QuerlError(Exception):
    """A file, a setting or a service cannot be used; the message says which and why."""

class PluginFault(QuerlError):
    """A plugin broke its contract or exceeded a limit."""

class Score:
    """A score of an episode or a dialogue."""

    @property
    def total(self) -> float:
        """Within the declared range."""

    @property
    def components(self) -> dict[str, float]:
        """In the plugin's order."""

    @property
    def episode(self) -> dict[str, Any] | None:
        """The episode that a `Scorer` scored, with hits, judgements and style; None for a score of a plugin alone."""

class Rejection:
    """Why there is no score. It is not a score of 0."""

    @property
    def code(self) -> str:
        """Stable, for counting: `baseline_retrieval_failed`."""

    @property
    def detail(self) -> str: ...
    @property
    def by(self) -> Literal["plugin", "host"]: ...
    @property
    def episode(self) -> dict[str, Any] | None: ...

class _Plugin:
    def __init__(
        self,
        path: _Path,
        settings: dict[str, Any] | None = None,
        limits: dict[str, Any] | None = None,
        trusted_keys: list[str] | None = None,
        digest: str | None = None,
    ) -> None: ...
    @property
    def name(self) -> str:
        """Id in the manifest."""

    @property
    def version(self) -> str: ...
    @property
    def digest(self) -> str:
        """SHA-256 of bundle or component. A worker that unpickles the object refuses another one."""

    def __reduce__(self) -> tuple[Any, ...]: ...

class Reward(_Plugin):
    def score(self, episodes: list[dict[str, Any]]) -> list[Score | Rejection]: ...
    @property
    def range(self) -> tuple[float, float]: ...
    @property
    def inputs(self) -> dict[str, str]: ...

class Prompt(_Plugin):
    """A tenant's prompts."""

    def messages(
        self,
        task: Literal["teacher", "policy", "judge"],
        query: str,
        user_profile: str = "",
        history_summary: str = "",
        rewrite: str | None = None,
    ) -> list[dict[str, str]]:
        """The conversation of a task; `rewrite` is the one to judge."""

    def parse_rewrite(self, text: str) -> str | None:
        """The rewrite in a model's response; None where the plugin finds none."""

class Filter(_Plugin):
    def check(self, samples: list[dict[str, Any]]) -> list[Rejection | None]: ...

class StyleScorer(_Plugin):
    def score(self, dialogues: list[dict[str, Any]]) -> list[Score | Rejection]: ...

class Scorer:
    def __init__(self, config: _Path, overrides: list[str] | None = None, digests: list[str] | None = None) -> None: ...
    def score(self, requests: list[dict[str, Any]]) -> list[Score | Rejection]: ...
    @property
    def range(self) -> tuple[float, float]: ...
    @property
    def tenant(self) -> str: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def load_config(path: _Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """The configuration in a file, or of a run directory, with every value in force."""

def set_program(path: _Path) -> None:
    """Names the `querl` program, which compiles plugins in a process of its own. The first call counts."""
