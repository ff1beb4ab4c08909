"""verifiers 0.4 and prime-rl: a taskset with the queries of a run, and a reward function for other tasksets.

    # querl_rewrites/__init__.py, an installed package: verifiers loads a taskset from a top-level module
    from querl.integrations.verifiers import QuerlTaskset
    __all__ = ["QuerlTaskset"]

    vf-eval querl-rewrites --env.taskset.task.config runs/demo --env.taskset.split val

    # the reward function in your own taskset, whose data has the field `querl`
    --env.taskset.task.rewards.querl.fn querl.integrations.verifiers:querl

Interface: `verifiers/v1/task.py` (`Task.score`, `@vf.reward`), `taskset.py`, `trace.py`. A reward function gets one trace,
not its group, so rewards that score groups cannot be used. A rejection raises `SampleRejected`; verifiers then records the
rollout as failed, not as a reward of 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf

from .._querl import QuerlError, Score, load_config
from . import MicroBatcher, config_path, content_text, open_scorer, request, total_or_raise

__all__ = ["QuerlData", "QuerlTask", "QuerlTaskConfig", "QuerlTaskset", "QuerlTasksetConfig", "querl", "score_trace"]

_batchers: dict[int, MicroBatcher] = {}


async def score_trace(trace: vf.Trace, label: Any, config: str | None = None) -> float:
    """Scores the last response of a trace. Records the components of the score as metrics `querl/NAME` of the trace.

    Raises SampleRejected for a rejection.
    """
    scorer = open_scorer(config)
    batcher = _batchers.setdefault(id(scorer), MicroBatcher(scorer))
    sampled = trace.assistant_messages
    prompt = [{"role": message.role, "content": content_text_of(message)} for message in trace.messages[:-1]]
    asked = request(
        label,
        (sampled[-1].content or "") if sampled else "",
        prompt=prompt or None,
        n_tokens=trace.num_output_tokens,
        truncated=trace.is_truncated,
    )
    result = await batcher.score(asked)
    if isinstance(result, Score):
        trace.record_metrics({f"querl/{name}": value for name, value in result.components.items()})
    return total_or_raise(result)


def content_text_of(message: Any) -> str:
    """The text of a message, without images."""
    content = message.content
    if isinstance(content, list):
        return "".join(part.text for part in content if part.type == "text")
    return content_text(content)


async def querl(task: vf.TaskData, trace: vf.Trace) -> float:
    """Reward function for any task whose data has the field `querl`: the id of a query, or the query as JSON text."""
    label = getattr(task, "querl", None)
    if not label:
        raise QuerlError(f"the data of {type(task).__name__} has no field `querl`, which names the query")
    return await score_trace(trace, label)


class QuerlData(vf.TaskData):  # type: ignore[misc]
    """One query of a run."""

    querl: str
    """Id of the query."""


class QuerlTaskConfig(vf.TaskConfig):  # type: ignore[misc]
    """`--env.taskset.task.*`"""

    config: str | None = None
    """A `querl.toml` or a run directory; None: the environment variable QUERL_CONFIG."""


class QuerlTask(vf.Task[QuerlData, vf.State, QuerlTaskConfig]):  # type: ignore[misc]
    """One query; its reward is the total of the configuration's reward plugins."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def querl(self, trace: vf.Trace) -> float:
        return await score_trace(trace, self.data.querl, self.config.config)


class QuerlTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """`--env.taskset.*`"""

    split: Literal["train", "val", "test"] = "train"
    task: QuerlTaskConfig = QuerlTaskConfig()


class QuerlTaskset(vf.Taskset[QuerlTask, QuerlTasksetConfig]):  # type: ignore[misc]
    """The queries of a run with the policy's prompts. Requires the stages up to `convert`."""

    def load(self) -> Iterable[QuerlTask]:
        path = run_directory(self.config.task.config) / "data" / f"{self.config.split}.jsonl"
        if not path.is_file():
            raise QuerlError(f"{path}: no such file; expected a run whose data stages are finished: `querl run CONFIG --to convert`")
        for row in dataset_rows(path):
            system, prompt = prompt_of(row["messages"])
            name = row["metadata"]["id"]
            yield QuerlTask(QuerlData(id=name, prompt=prompt, system_prompt=system, querl=name), self.config.task)


def run_directory(config: str | None) -> Path:
    """`config` if it is a run directory, else the output directory of the configuration file."""
    path = Path(config_path(config))
    return path if path.is_dir() else Path(load_config(path)["output_dir"])


def dataset_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.strip())


def prompt_of(messages: list[dict[str, str]]) -> tuple[str | None, list[Any]]:
    """System prompt and the other messages, without the teacher's rewrite at the end."""
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    system = [message["content"] for message in messages if message["role"] == "system"]
    kinds = {"user": vf.UserMessage, "assistant": vf.AssistantMessage}
    turns = [kinds[message["role"]](content=message["content"]) for message in messages if message["role"] in kinds]
    return "\n\n".join(system) or None, turns
