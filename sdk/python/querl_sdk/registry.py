"""Which classes a plugin is made of."""

from __future__ import annotations

from dataclasses import dataclass

from .filter import Filter
from .prompt import Prompt
from .reward import Reward
from .style import StyleScorer


@dataclass
class Exports:
    """The classes of one plugin, one for each kind that it has."""

    prompt: type[Prompt] | None = None
    filter: type[Filter] | None = None
    reward: type[Reward] | None = None
    style_scorer: type[StyleScorer] | None = None

    def kinds(self) -> dict[str, type]:
        """What is there, by the names that ``plugin.toml`` has for kinds."""
        named = {
            "prompt": self.prompt,
            "filter": self.filter,
            "reward": self.reward,
            "style-scorer": self.style_scorer,
        }
        return {kind: plugin for kind, plugin in named.items() if plugin is not None}


_exported: Exports | None = None


def export(
    *,
    prompt: type[Prompt] | None = None,
    filter: type[Filter] | None = None,
    reward: type[Reward] | None = None,
    style_scorer: type[StyleScorer] | None = None,
) -> None:
    """Says what the plugin is made of: ``export(reward=Brevity)``, once, at the top level of ``plugin.py``."""
    global _exported
    exports = Exports(prompt=prompt, filter=filter, reward=reward, style_scorer=style_scorer)
    bases = {"prompt": Prompt, "filter": Filter, "reward": Reward, "style-scorer": StyleScorer}
    if not exports.kinds():
        raise TypeError("export() names no class; expected for example `export(reward=Brevity)`")
    for kind, plugin in exports.kinds().items():
        base = bases[kind]
        if not (isinstance(plugin, type) and issubclass(plugin, base)):
            raise TypeError(f"export() has {plugin!r} as {kind}; expected a class derived from `querl_sdk.{base.__name__}`")
        missing = sorted(getattr(plugin, "__abstractmethods__", ()))
        if missing:
            raise TypeError(f"`{plugin.__name__}` has no method `{missing[0]}`, which a {kind} needs")
    _exported = exports


def exported() -> Exports:
    """What the plugin said with :func:`export`."""
    if _exported is None:
        raise TypeError("plugin.py exports nothing; expected for example `export(reward=Brevity)` at its end")
    return _exported
