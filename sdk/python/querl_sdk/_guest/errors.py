"""Improves error messages: adds the plugin's traceback, or the remedy, where the interpreter of a component reports neither."""

from __future__ import annotations

import functools
import os
import sys

_MODULES = "import it at the top of plugin.py: a component has only the modules that were loaded when it was built, and no network and threads"


def explained(interface: type) -> type:
    """Class decorator: methods convert SystemExit to an error with traceback, and add the remedy to ModuleNotFoundError."""
    for name, method in list(vars(interface).items()):
        if not name.startswith("_"):
            setattr(interface, name, _explained(method))
    return interface


def _explained(method):
    @functools.wraps(method)
    def call(*arguments):
        try:
            return method(*arguments)
        except SystemExit as exit:
            raise RuntimeError(f"the plugin called exit ({exit}); expected a result, or an exception") from exit
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}; {_MODULES}", name=error.name) from error

    return call


def replace_exit() -> None:
    """Replaces `os._exit` by `sys.exit`, because `os._exit` would end the component without a traceback."""
    os._exit = sys.exit
