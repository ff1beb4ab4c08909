"""The extension module: plugins and the RL environment of a configuration. All objects are thread-safe."""

import os
from typing import Any, Literal

__version__: str

_Path = str | os.PathLike[str]

class QuerlError(Exception):
    """A file, a setting or a service cannot be used. The message names it and the reason."""

class PluginFault(QuerlError):
    """A plugin violated its contract (wit/) or exceeded a limit of fuel, memory or time."""

class Score:
    """A score of an episode or a dialogue."""

    @property
    def total(self) -> float:
        """The score, within the declared range."""

    @property
    def components(self) -> dict[str, float]:
        """Named parts of the score, in the plugin's order."""

    @property
    def episode(self) -> dict[str, Any] | None:
        """The scored episode with hits, judge scores and style, for results of a `Scorer`; None for results of a single plugin."""

class Rejection:
    """The reason why an item has no score. It is not a score of 0."""

    @property
    def code(self) -> str:
        """Stable identifier for counting, such as `baseline_retrieval_failed`."""

    @property
    def detail(self) -> str:
        """One sentence for people; may change between versions."""

    @property
    def by(self) -> Literal["plugin", "host"]:
        """Who rejected the item: the plugin, or querl itself (`host`), for example because retrieval failed."""

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
        """The plugin's name in its manifest (plugin.toml)."""

    @property
    def version(self) -> str: ...
    @property
    def digest(self) -> str:
        """SHA-256 of the bundle or component. Unpickling fails if the file has another digest."""

    def __reduce__(self) -> tuple[Any, ...]: ...

class Reward(_Plugin):
    def score(self, episodes: list[dict[str, Any]]) -> list[Score | Rejection]: ...
    @property
    def range(self) -> tuple[float, float]: ...
    @property
    def inputs(self) -> dict[str, str]: ...

class Prompt(_Plugin):
    """A prompt plugin: builds prompts and parses responses."""

    def messages(
        self,
        task: Literal["teacher", "policy", "judge"],
        query: str,
        user_profile: str = "",
        history_summary: str = "",
        rewrite: str | None = None,
    ) -> list[dict[str, str]]:
        """The messages `[{"role", "content"}]` of a task's prompt. `rewrite`: the rewrite to judge, for the task `judge` only."""

    def parse_rewrite(self, text: str) -> str | None:
        """The rewrite in a model's response; None if the response contains no rewrite."""

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
    """The resolved configuration of a `querl.toml` or a run directory: every key with its value, defaults included."""

def set_program(path: _Path) -> None:
    """Sets the path of the `querl` program, which compiles plugins in a subprocess. Later calls have no effect."""
