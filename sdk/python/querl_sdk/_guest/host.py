"""Connects settings, log and host functions of the SDK to the host."""

from __future__ import annotations

from importlib import import_module

from componentize_py_types import Err
from wit_world.imports import log as wit_log
from wit_world.imports import settings as wit_settings

from .. import host, log
from ..settings import Settings
from . import convert

_LEVELS = {level.name.lower(): level for level in wit_log.Level}
# Names of the contract's functions by those of `querl_sdk.host`. The bindings contain only the interfaces that plugin.toml declares.
_FUNCTIONS = {
    "count_tokens": "count",
    "split_tokens": "split",
    "segment_words": "segment",
    "embed": "embed",
    "ask_judge": "ask",
    "classify_style": "classify",
}


def settings() -> Settings:
    """The plugin's settings, read from the host."""
    return Settings.from_source(wit_settings.get)


def connect(interfaces) -> None:
    """Forwards log lines and calls of host functions to the host."""
    modules = {name: import_module(f"wit_world.imports.{name.replace('-', '_')}") for name in interfaces}

    def call(interface, function, argument):
        if interface not in modules:
            raise host._not_declared(interface)
        if function in ("ask_judge", "classify_style"):
            argument = [convert.message_out(message) for message in argument]
        try:
            return getattr(modules[interface], _FUNCTIONS[function])(argument)
        except Err as error:
            failure = getattr(error.value, "value", None)
        raise host.HostCallError(interface, None if failure is None else convert.call_failure(failure))

    host._send_to(call)
    log._send_to(lambda level, message: wit_log.log(_LEVELS[level], message))
