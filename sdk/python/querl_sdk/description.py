"""The description of a plugin (``info.describe`` of the contract), derived from its classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .settings import SettingError, Settings, SettingSpec


@dataclass(slots=True)
class Description:
    """Kinds, settings, range and inputs of a plugin."""

    kinds: list[str]
    settings: list[SettingSpec]
    """The settings that the constructors read."""
    range: tuple[float, float] | None
    """Range of totals with default settings; ``None`` if the plugin is not a reward or a setting has no default."""
    inputs: dict[str, bool]
    """Declared inputs; True for those in ``requires``, False for those in ``uses``."""


def describe(classes: Mapping[str, type]) -> Description:
    """Describes a plugin, given its classes by kind.

    Constructs each class without settings and records the keys that the constructor reads. Raises :class:`TypeError` if a constructor
    fails without settings, or if two classes read a key with different types, defaults or bounds.
    """
    specs: dict[str, SettingSpec] = {}
    inputs: dict[str, bool] = {}
    plugins: list[Any] = []
    for plugin in classes.values():
        recorded: list[SettingSpec] = []
        try:
            plugins.append(plugin(Settings.recording(recorded)))
        except SettingError as error:
            raise TypeError(
                f"`{plugin.__name__}` refuses its defaults, {error}; expected a constructor that finishes without settings, so that "
                "what it reads can be described"
            ) from error
        for spec in recorded:
            if specs.setdefault(spec.key, spec) != spec:
                raise TypeError(f"the setting `{spec.key}` is read in two ways: {specs[spec.key]} and {spec}; read it in one")
        inputs |= {name: inputs.get(name, False) for name in getattr(plugin, "uses", ())}
        inputs |= {name: True for name in getattr(plugin, "requires", ())}
    has_defaults = all(spec.default is not None for spec in specs.values())
    low_high = next((range_of(plugin) for plugin in plugins if hasattr(plugin, "range")), None) if has_defaults else None
    return Description(list(classes), list(specs.values()), low_high, inputs)


def range_of(plugin: Any) -> tuple[float, float]:
    """The range of a reward. Raises :class:`TypeError` if its ``range`` does not return two numbers."""
    returned = plugin.range()
    if isinstance(returned, (tuple, list)) and len(returned) == 2 and all(isinstance(bound, (int, float)) for bound in returned):
        return float(returned[0]), float(returned[1])
    file = type(plugin).__module__.replace(".", "/")
    raise TypeError(f"{file}.py: `{type(plugin).__name__}.range` returned {returned!r}; expected two numbers (low, high)")
