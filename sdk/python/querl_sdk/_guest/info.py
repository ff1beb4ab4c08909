"""The interface `info`."""

from __future__ import annotations

from componentize_py_types import Err
from wit_world.exports import info as wit

from ..registry import exported
from ..settings import SettingError
from . import host


def info_of(name: str, version: str) -> type:
    """The class that componentize-py asks for name, version and a check of the settings."""

    class Info:
        def describe(self):
            return wit.Description(name, version)

        def check_settings(self) -> None:
            try:
                for plugin in exported().kinds().values():
                    plugin(host.settings())
            except SettingError as error:
                raise Err(wit.SettingError(error.key, error.message)) from None

    return Info
