"""The interface `info`."""

from __future__ import annotations

from collections.abc import Mapping

from componentize_py_types import Err
from wit_world.exports import info as wit
from wit_world.imports import types as wit_types

from ..description import describe
from ..registry import exported
from ..settings import SettingError
from . import host
from .convert import case_of
from .errors import explained


def info_of(name: str, version: str, docs: Mapping[str, str]) -> type:
    """Creates the class for the interface `info`: description, and check of the settings. Runs when the component is built."""
    described = describe(exported())
    settings = [
        wit.Setting(
            spec.key,
            case_of(wit, "SettingType", spec.value_type),
            spec.default,
            spec.minimum,
            spec.maximum,
            spec.choices,
            docs.get(spec.key),
        )
        for spec in described.settings
    ]
    description = wit.Description(
        name,
        version,
        [case_of(wit, "Kind", kind) for kind in described.kinds],
        settings,
        None if described.range is None else wit_types.Bounds(*described.range),
        [wit.InputUse(case_of(wit, "Input", input), required) for input, required in described.inputs.items()],
    )

    @explained
    class Info:
        def describe(self):
            return description

        def check_settings(self) -> None:
            try:
                for plugin in exported().values():
                    plugin(host.settings())
            except SettingError as error:
                raise Err(wit.SettingError(error.key, error.message)) from None

    return Info
