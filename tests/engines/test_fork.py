"""Objects of `querl` in a child of `os.fork`, in which only the forking thread exists."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REWARD, Sample

querl = pytest.importorskip("querl")
if sys.platform == "win32":
    pytest.skip("no fork", allow_module_level=True)

TIMEOUT_S = 60.0


def in_child(action: Callable[[], Any]) -> Any:
    """Runs `action` in a child process with a time limit; returns its result, passed as JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            text = json.dumps(action())
            with os.fdopen(writer, "w") as pipe:
                pipe.write(text)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)  # without pytest's shutdown
    os.close(writer)
    with os.fdopen(reader) as pipe:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                pytest.fail(f"the child has not ended after {TIMEOUT_S} s")
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(status) == 0
        return json.loads(pipe.read())


def totals(results: list[Any]) -> list[float | None]:
    return [getattr(result, "total", None) for result in results]


def test_an_inherited_scorer_scores(scorer: Any, samples: list[Sample], results: list[Any]) -> None:
    requests = [sample.request for sample in samples[:8]]
    assert in_child(lambda: totals(scorer.score(requests))) == totals(results[:8])
    # The objects of the parent still work.
    assert totals(scorer.score(requests)) == totals(results[:8])


def test_an_inherited_reward_scores(results: list[Any]) -> None:
    reward = querl.Reward(REWARD)
    scored = [result for result in results if isinstance(result, querl.Score)][:8]
    episodes = [result.episode for result in scored]
    assert in_child(lambda: totals(reward.score(episodes))) == totals(scored)


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("name", ["reward", "scorer"])
def test_an_inherited_object_is_dropped(name: str, used: bool, run: Path) -> None:
    """Symptom: the destructor of the thread pool waited for threads that do not exist in a child."""
    held = [querl.Reward(REWARD) if name == "reward" else querl.load(run)]

    def drop() -> int:
        if used:
            assert len(held[0].range) == 2
        held.clear()
        return gc.collect() * 0

    assert in_child(drop) == 0


def test_the_scorers_of_integrations_open_in_a_child(samples: list[Sample], results: list[Any]) -> None:
    from querl.integrations import _opening, open_scorer

    # At the time of the fork another thread may hold the lock.
    with _opening:
        assert in_child(lambda: totals(open_scorer().score([samples[0].request]))) == totals(results[:1])
