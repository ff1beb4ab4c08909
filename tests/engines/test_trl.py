"""querl.integrations.trl, called directly and in TRL's trainer."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from conftest import REJECTED_CODE, REJECTED_LABEL, ROOT, Sample

querl = pytest.importorskip("querl")
from querl.integrations.trl import reward_function  # noqa: E402


class Log:
    """Replaces `log_extra` and `log_metric` of TRL's trainer."""

    def __init__(self) -> None:
        self.extra: defaultdict[str, list[Any]] = defaultdict(list)
        self.metrics: defaultdict[str, list[float]] = defaultdict(list)

    def arguments(self) -> dict[str, Any]:
        return {
            "log_extra": lambda column, values: self.extra[column].extend(values),
            "log_metric": lambda name, value: self.metrics[name].append(value),
        }


def test_a_rejection_is_none_and_is_counted(samples: list[Sample], results: list[Any]) -> None:
    position = next(index for index, result in enumerate(results) if isinstance(result, querl.Score))
    sample, log = samples[position], Log()
    arguments = {"prompts": ["", ""], "completions": [sample.response, "鱼油"], "querl": [sample.id, REJECTED_LABEL]}
    rewards = reward_function()(**arguments, **log.arguments())
    assert rewards == [results[position].total, None]
    assert log.extra["querl/rejected"] == ["", REJECTED_CODE]
    assert [json.loads(text) for text in log.extra["querl/components"]] == [results[position].components, {}]
    assert dict(log.metrics) == {"querl/rejected": [0.5]}


def test_the_names_that_are_logged_do_not_depend_on_the_batch(samples: list[Sample]) -> None:
    """Processes gather logged values by name: in some releases of TRL a name that one process lacks blocks all."""
    logs = [Log(), Log()]
    for log, label in zip(logs, (samples[0].id, REJECTED_LABEL), strict=True):
        reward_function()([""], ["鱼油"], querl=[label], **log.arguments())
    assert [(log.extra.keys(), log.metrics.keys()) for log in logs] == [(logs[0].extra.keys(), logs[0].metrics.keys())] * 2


def test_plain_completions_and_the_columns_of_our_datasets(samples: list[Sample], results: list[Any]) -> None:
    chosen = samples[:8]
    prompts, completions = [sample.prompt for sample in chosen], [sample.response for sample in chosen]
    metadata = [{"id": sample.id} for sample in chosen]
    totals = [getattr(result, "total", None) for result in results[:8]]
    assert reward_function()(prompts, completions, metadata=metadata) == totals


def test_the_query_itself_is_a_label(scorer: Any) -> None:
    columns = {"original_query": ["一天几粒啊"], "history_summary": ["咨询深海鱼油软胶囊"], "baseline": ["鱼油 用量"]}
    label = {name: values[0] for name, values in columns.items() if name != "original_query"} | {"query": "一天几粒啊"}
    (expected,) = scorer.score([{"query": label, "response": "深海鱼油软胶囊 食用方法"}])
    assert reward_function()([""], ["深海鱼油软胶囊 食用方法"], **columns) == [expected.total]
    as_text = reward_function()([""], ["深海鱼油软胶囊 食用方法"], querl=[json.dumps(label, ensure_ascii=False)])
    assert as_text == [expected.total]


def test_a_row_without_a_query_is_an_error() -> None:
    with pytest.raises(querl.QuerlError, match=r"expected a column `querl`.*its columns: solution"):
        reward_function()([""], ["鱼油"], solution=["x"])


def test_the_end_of_a_completion_is_seen_in_its_tokens() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.requests: list[dict[str, Any]] = []

        def score(self, requests: list[dict[str, Any]]) -> list[Any]:
            self.requests = requests
            return []

    recorder = Recorder()
    reward_function(recorder, eos_token_ids=[0])(["", ""], ["a", "b"], completion_ids=[[5, 0], [5, 6, 7]], querl=["q", "q"])
    seen = [(one["n_tokens"], one["truncated"], one["sample_index"]) for one in recorder.requests]
    assert seen == [(2, False, 0), (3, True, 1)]


def test_the_function_is_pickled(samples: list[Sample], results: list[Any]) -> None:
    again = pickle.loads(pickle.dumps(reward_function(name="rewrites")))
    assert again.__name__ == "rewrites"
    totals = [getattr(result, "total", None) for result in results[:4]]
    assert again([""] * 4, [sample.response for sample in samples[:4]], querl=[sample.id for sample in samples[:4]]) == totals


def test_one_step_of_grpo(samples: list[Sample], tmp_path: Path) -> None:
    """The trainer calls the function with its arguments and logs its metrics. Trains the example's model on the CPU."""
    # TRL before 1.0 has no `log_metric`.
    trl, datasets = pytest.importorskip("trl", minversion="1.0"), pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    rows = [{"prompt": sample.prompt, "querl": sample.id} for sample in samples[::4][:8]]
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "examples/tiny-qwen3")
    trainer = trl.GRPOTrainer(
        model=str(ROOT / "examples/tiny-qwen3"),
        reward_funcs=reward_function(),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "rewards/querl/mean" in entry]
    assert logged and "querl/rejected" in logged[0], trainer.state.log_history
