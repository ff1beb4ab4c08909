"""The clients of OpenRLHF and slime with `querl serve reward`."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import QUERL, ROOT, Sample

querl = pytest.importorskip("querl")
pytest.importorskip("aiohttp")

N_SAMPLES = 64
#: A checkout of slime 0.3.1 made by setup.sh; slime is not on a package index.
SLIME = Path(os.environ.get("SLIME", Path(__file__).parent / ".venv" / "slime"))


@pytest.fixture(scope="module")
def daemon(run: Path) -> Iterator[str]:
    """Starts `querl serve reward` on the run; yields its address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    process = subprocess.Popen([QUERL, "serve", "reward", str(run), "--addr", address], stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://{address}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def scored(scorer: Any, samples: list[Sample]) -> list[tuple[Sample, float]]:
    """Samples and the host's totals for them, without the fields that these clients do not send."""
    results = scorer.score([{"query": sample.id, "response": sample.response} for sample in samples[: 2 * N_SAMPLES]])
    pairs = [(sample, result.total) for sample, result in zip(samples, results, strict=False) if isinstance(result, querl.Score)]
    assert len(pairs) >= N_SAMPLES
    return pairs[:N_SAMPLES]


class Engine:
    """Replaces OpenRLHF's vLLM engine: returns a given response."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    async def generate(self, *_: Any, **__: Any) -> Any:
        output = types.SimpleNamespace(token_ids=self.tokens, finish_reason="stop", logprobs=None)
        return types.SimpleNamespace(outputs=[output])


def test_openrlhf_gets_the_totals_of_the_host(daemon: str, scored: list[tuple[Sample, float]]) -> None:
    """OpenRLHF's single-turn executor tokenizes prompt and response, decodes and posts them, and reads the rewards of the response."""
    agent, transformers = pytest.importorskip("openrlhf.utils.agent"), pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "examples/tiny-qwen3")
    executor = agent.SingleTurnAgentExecutor([f"{daemon}/openrlhf"])
    parameters = types.SimpleNamespace(max_tokens=64, logprobs=None)

    async def one(sample: Sample) -> Any:
        prompt = tokenizer.apply_chat_template(sample.prompt, add_generation_prompt=True, tokenize=False)
        tokens = [*tokenizer.encode(sample.response, add_special_tokens=False), tokenizer.eos_token_id]
        return await executor.execute(prompt, sample.id, parameters, 4096, tokenizer, Engine(tokens))

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*[one(sample) for sample, _ in scored])

    outputs = asyncio.run(all_of_them())
    expected = [total.hex() for _, total in scored]
    assert [float(output["reward"][0]).hex() for output in outputs] == expected
    assert [float(output["scores"][0]).hex() for output in outputs] == expected
    assert [output["extra_logs"]["rejected"] for output in outputs] == [[0.0]] * len(outputs)


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module slime/rollout/rm_hub."""
    if not (SLIME / "slime").is_dir():
        pytest.skip(f"{SLIME} is not a checkout of slime: setup.sh")
    monkeypatch.syspath_prepend(str(SLIME))
    return pytest.importorskip("slime.rollout.rm_hub", exc_type=ImportError)


@pytest.mark.parametrize("form", ["slime", "slime/dict"])
def test_slime_gets_the_totals_of_the_host(form: str, slime: Any, daemon: str, scored: list[tuple[Sample, float]]) -> None:
    """`--rm-type remote_rm`, through the function that slime's rollout calls."""
    types_of_slime = sys.modules["slime.utils.types"]
    arguments = types.SimpleNamespace(custom_rm_path=None, rm_type="remote_rm", rm_url=f"{daemon}/{form}")
    made = [types_of_slime.Sample(prompt=sample.prompt, response=sample.response, label=sample.id) for sample, _ in scored]

    async def rewards() -> list[Any]:
        try:
            return await slime.batched_async_rm(arguments, made)
        finally:
            await slime._get_shared_session().close()

    found = asyncio.run(rewards())
    # As in Sample.get_reward_value with `--reward-key score`.
    arguments.reward_key = "score" if form == "slime/dict" else None
    for sample, reward in zip(made, found, strict=True):
        sample.reward = reward
    assert [float(sample.get_reward_value(arguments)).hex() for sample in made] == [total.hex() for _, total in scored]
