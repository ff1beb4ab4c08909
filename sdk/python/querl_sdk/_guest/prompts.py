"""The interface `prompts`."""

from __future__ import annotations

from componentize_py_types import Err

from ..prompt import PromptInput, PromptTask
from ..registry import exported
from ..types import Rejection
from . import convert, host
from .errors import explained

_TASKS = {task.value: task for task in PromptTask}


@explained
class Prompts:
    def messages(self, task, input):
        name = convert.case_name(task)
        prompt_input = PromptInput(input.query, input.context, input.rewrite)

        def messages(plugin):
            if name not in _TASKS:
                raise Rejection("unknown_task", f"the plugin has no prompt for the task `{name}`")
            return plugin.messages(_TASKS[name], prompt_input)

        return [convert.message_out(message) for message in _or_rejection(messages)]

    def parse_rewrite(self, text):
        return _or_rejection(lambda plugin: plugin.parse_rewrite(text))

    def parse_judgement(self, text):
        judged = _or_rejection(lambda plugin: plugin.parse_judgement(text))
        return convert.wit.JudgeScore(float(judged.score), judged.reason)


def _or_rejection(call):
    try:
        return call(exported()["prompt"](host.settings()))
    except Rejection as rejection:
        raise Err(convert.rejection(rejection)) from None
