"""Errors that the interpreter of a component would report without the author's line, or without what to do."""

from __future__ import annotations

import functools
import os
import sys

_MODULES = "import it at the top of plugin.py: a component has only the modules that were loaded when it was built, and no network and threads"


def explained(interface: type) -> type:
    """The class of an interface, whose methods raise SystemExit as an error with its traceback, and say of a missing module what to do."""
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
    """Makes `os._exit` an exception: it would end the component without a traceback."""
    os._exit = sys.exit
