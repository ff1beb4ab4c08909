"""Registers the classes of a plugin."""

from __future__ import annotations

from .filter import Filter
from .prompt import Prompt
from .reward import GroupReward, Reward
from .style import StyleScorer

KINDS: dict[str, type] = {
    "prompt": Prompt,
    "filter": Filter,
    "reward": Reward,
    "group-reward": GroupReward,
    "style-scorer": StyleScorer,
}
"""The base class of each kind, by the kind's name in ``plugin.toml``."""

INPUTS = ("response", "prompt", "columns", "baseline", "retrieval", "judgement", "style")
"""The inputs that a reward may declare in ``requires`` and ``uses``."""

_exported: dict[str, type] | None = None


def export(
    *,
    prompt: type[Prompt] | None = None,
    filter: type[Filter] | None = None,
    reward: type[Reward] | None = None,
    group_reward: type[GroupReward] | None = None,
    style_scorer: type[StyleScorer] | None = None,
) -> None:
    """Registers the plugin's classes. Call it once, at the top level of ``plugin.py``: ``export(reward=Brevity)``."""
    global _exported
    classes = dict(zip(KINDS, (prompt, filter, reward, group_reward, style_scorer)))
    named = {kind: plugin for kind, plugin in classes.items() if plugin is not None}
    if not named:
        raise TypeError("export() names no class; expected for example `export(reward=Brevity)`")
    if reward and group_reward:
        raise TypeError("export() has a reward and a group reward; expected one of them, and another plugin for the other")
    for kind, plugin in named.items():
        check_class(kind, plugin)
    _exported = named


def check_class(kind: str, plugin: object) -> None:
    """Raises :class:`TypeError` if ``plugin`` is not a complete class of this kind."""
    base = KINDS[kind]
    if not (isinstance(plugin, type) and issubclass(plugin, base)):
        raise TypeError(f"export() has {plugin!r} as {kind}; expected a class derived from `querl_sdk.{base.__name__}`")
    missing = sorted(getattr(plugin, "__abstractmethods__", ()))
    if missing:
        raise TypeError(f"`{plugin.__name__}` has no method `{missing[0]}`, which a {kind} needs")
    known = INPUTS if hasattr(plugin, "range") else ("columns",)
    for attribute in ("requires", "uses"):
        inputs = getattr(plugin, attribute, ())
        if not isinstance(inputs, (tuple, list)) or not all(name in known for name in inputs):
            raise TypeError(f"`{plugin.__name__}.{attribute}` is {inputs!r}; expected a tuple of {', '.join(map(repr, known))}")


def exported() -> dict[str, type]:
    """The classes passed to :func:`export`, by kind."""
    if _exported is None:
        raise TypeError("plugin.py exports nothing; expected for example `export(reward=Brevity)` at its end")
    return _exported
