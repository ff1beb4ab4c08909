"""What the host offers, as the authors' types."""

from __future__ import annotations

from wit_world.imports import log as wit_log
from wit_world.imports import settings as wit_settings

from .. import log
from ..settings import Settings

_LEVELS = {level.name.lower(): level for level in wit_log.Level}


def settings() -> Settings:
    """The settings that the host holds."""
    return Settings.from_source(wit_settings.get)


def send_log_to_host() -> None:
    """Has the author's log lines arrive in the host's log."""
    log._send_to(lambda level, message: wit_log.log(_LEVELS[level], message))
