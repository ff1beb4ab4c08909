"""The interface `prompts`."""

from __future__ import annotations

from componentize_py_types import Err
from wit_world.exports import prompts as wit
from wit_world.imports import types as wit_types

from ..prompt import PromptInput, PromptTask
from ..registry import exported
from ..types import Rejection
from . import convert, host

_TASKS = {task: PromptTask[task.name] for task in wit.Task}


class Prompts:
    def messages(self, task, input):
        asked = PromptInput(input.query, input.context, input.rewrite)
        messages = exported().prompt(host.settings()).messages(_TASKS[task], asked)
        return [convert.message_out(message) for message in messages]

    def parse_rewrite(self, text):
        return _parsed(lambda plugin: plugin.parse_rewrite(text))

    def parse_judgement(self, text):
        judged = _parsed(lambda plugin: plugin.parse_judgement(text))
        return wit_types.JudgeScore(float(judged.score), judged.reason)


def _parsed(parse):
    try:
        return parse(exported().prompt(host.settings()))
    except Rejection as rejection:
        raise Err(convert.rejection(rejection)) from None
