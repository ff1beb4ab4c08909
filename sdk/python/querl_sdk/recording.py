"""Host functions that return the results recorded in golden cases and in ``episodes.jsonl``."""

from __future__ import annotations

from array import array
from typing import Any

from .host import HostCallError, Receiver
from .types import Message, call_failure, distribution


def recorded(calls: list[dict[str, Any]]) -> Receiver:
    """A receiver that returns the result of the first recorded call with the same request. Other calls fail with ``not_recorded``."""

    def call(interface: str, function: str, argument: Any) -> Any:
        sent = [{"role": each.role.value, "content": each.content} if isinstance(each, Message) else each for each in argument]
        wanted = {function: argument if isinstance(argument, str) else sent}
        for each in calls:
            if each["request"] == wanted:
                return _response(interface, each["response"])
        message = "the recording has no result for this call"
        raise HostCallError(interface, call_failure({"kind": "not_recorded", "message": message}))

    return call


def _response(interface: str, response: dict[str, Any]) -> Any:
    if "Err" in response:
        error = response["Err"]
        raise HostCallError(interface, None if error == "not_configured" else call_failure(error["failed"]))
    ((form, value),) = response["Ok"].items()
    if form == "vectors":
        # Recorded vectors are f32, printed with the shortest digits that identify the f32 value.
        return [array("f", vector).tolist() for vector in value]
    return distribution(value) if form == "style" else value
