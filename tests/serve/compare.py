#!/usr/bin/env python3
"""Throughput and latency of `querl serve rewrite`, llama.cpp's server and transformers, on one model at the same precision.

    tests/serve/compare.py --llama_server PROGRAM [--querl PROGRAM] [--folder DIR] [--shape qwen2.5-0.5b] [--dtypes f32 bf16 int8]
                           [--clients 1 8 64] [--rounds 2] [--systems querl llama transformers] [--tenants 1]

The model has the shape of `--shape` and random weights, with a LoRA adapter after one training step. querl serves base and adapter, the others
the merged model. Prompts have 256 tokens and share the first 192; responses have 16 greedy tokens. Each client sends its next request when the
previous one is answered. For each precision and number of clients the systems run one after another, `--rounds` times; the table has the median
of the rounds, and querl's throughput divided by the others'. With `--tenants N` querl serves N copies of the adapter as separate tenants, and
the clients use them in turn.

llama.cpp: `llama-server` with a slot for each client, continuous batching and its prompt cache; q8_0 for int8. Its source is in the source
package of llama-cpp-python: cmake -S vendor/llama.cpp -B build -DGGML_NATIVE=ON && cmake --build build --target llama-server.
transformers: `generate` on a batch of all clients' prompts in this process, without HTTP; it has no int8 on CPUs. Each system warms up with one
request per client, so that a cache contains the shared prefix. Needs Python 3.11, and transformers and torch for that system.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from load import copies

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "examples/tiny-qwen3"
N_PROMPT, N_SHARED, N_RESPONSE = 256, 192, 16
GGUF_TYPES = {"f32": "f32", "bf16": "bf16", "int8": "q8_0"}
TENANT = "bench"

CONFIG = """tenant = "{tenant}"
output_dir = "run"
[data]
input = "queries.jsonl"
query_column = "original_query"
profile_column = "user_profile"
history_column = "history_summary"
[teacher]
kind = "recorded"
path = "queries.jsonl"
[judge]
kind = "rubric"
[retrieval]
kind = "embedded"
knowledge_base = "{example}/knowledge_base.jsonl"
lexicon = "{example}/lexicon.json"
score_threshold = 0.0
[model]
path = "model"
dtype = "bf16"
[sft]
max_steps = 1
batch_size = 1
gradient_accumulation_steps = 1
eval_steps = 0
early_stopping_patience = 0
[plugins]
prompt = {{ path = "{plugins}/tenant-fivedoctors" }}
rewards = [{{ path = "{plugins}/reward-competition" }}]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--querl", type=Path, default=REPOSITORY / "target/release/querl")
    parser.add_argument("--llama_server", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/querl-compare"), help="kept between runs")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16", "int8"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=0, help="of each round [default: 3 of each client, at least 8]")
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--systems", nargs="+", default=["querl", "llama", "transformers"])
    args = parser.parse_args()
    folder = (args.folder / args.shape).resolve()
    prepare(args.querl.resolve(), folder, args.shape, args.dtypes)
    print(f"{'dtype':5} {'clients':>7} {'system':12} {'requests/s':>10} {'p50 ms':>8} {'p95 ms':>8} {'querl/it':>8}", flush=True)
    for dtype in args.dtypes:
        for n_clients in args.clients:
            systems = [name for name in args.systems if (name, dtype) != ("transformers", "int8")]
            found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in systems}
            for round_ in range(args.rounds):
                for name in systems:
                    n_requests = args.requests or max(8, 3 * n_clients)
                    found[name].append(SYSTEMS[name](args, folder, dtype, n_clients, n_requests, round_))
            medians = {name: [statistics.median(column) for column in zip(*rounds)] for name, rounds in found.items()}
            for name, (throughput, p50, p95) in medians.items():
                ratio = medians["querl"][0] / throughput if "querl" in medians else float("nan")
                print(f"{dtype:5} {n_clients:7} {name:12} {throughput:10.2f} {p50:8.0f} {p95:8.0f} {ratio:8.2f}", flush=True)
    return 0


def prepare(querl: Path, folder: Path, shape: str, dtypes: list[str]) -> None:
    """Makes the model, a run with an adapter for it, and GGUF files of the merged model."""
    folder.mkdir(parents=True, exist_ok=True)
    model, run = folder / "model", folder / "run"
    if not (run / "sft/best/adapter_config.json").exists():
        for old in (model, run):
            shutil.rmtree(old, ignore_errors=True)
        call([querl, "model", "init", "--shape", shape, "--dtype", "bf16", "--out", model])
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            shutil.copy(TINY / file, model / file)
        example = REPOSITORY / "examples/fivedoctors"
        rows = (example / "teacher_rewrites.jsonl").read_text(encoding="utf-8").splitlines()[:30]
        (folder / "queries.jsonl").write_text("\n".join(rows), encoding="utf-8")
        config = CONFIG.format(tenant=TENANT, example=example, plugins=REPOSITORY / "plugins")
        (folder / "querl.toml").write_text(config, encoding="utf-8")
        call([querl, "run", folder / "querl.toml", "--out", run, "--to", "sft"])
    for dtype in dtypes:
        path = folder / f"{dtype}.gguf"
        if not path.exists():
            call([querl, "export", "gguf", run, "--out", path, "--dtype", GGUF_TYPES[dtype]])


def call(command: list) -> None:
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def querl(args: argparse.Namespace, folder: Path, dtype: str, n_clients: int, n_requests: int, round_: int) -> tuple:
    body = {"temperature": 0, "max_completion_tokens": N_RESPONSE}
    with tempfile.TemporaryDirectory() as temporary:
        runs, models = [folder / "run"], [TENANT]
        if args.tenants > 1:
            runs = copies(folder / "run", args.tenants, Path(temporary))
            models = [f"tenant-{index}" for index in range(args.tenants)]
        command = [args.querl.resolve(), "serve", "rewrite", *runs, "--dtype", dtype, "--cache", "0", "--max_running", "64"]
        with server(command, lambda port: ["--addr", f"127.0.0.1:{port}"], "/ready") as port:
            return measure(port, [body | {"model": model} for model in models], n_clients, n_requests, round_)


def llama(args: argparse.Namespace, folder: Path, dtype: str, n_clients: int, n_requests: int, round_: int) -> tuple:
    n_positions = (N_PROMPT + N_RESPONSE + 16) * n_clients
    command = [args.llama_server, "-m", folder / f"{dtype}.gguf", "-c", n_positions, "-np", n_clients, "-t", os.cpu_count(), "-tb", os.cpu_count()]
    command += ["--cont-batching", "--cache-ram", "0", "-fa", "auto"]
    body = {"temperature": 0, "max_tokens": N_RESPONSE, "ignore_eos": True, "cache_prompt": True}
    with server(command, lambda port: ["--host", "127.0.0.1", "--port", port], "/health") as port:
        return measure(port, [body], n_clients, n_requests, round_)


def transformers(args: argparse.Namespace, folder: Path, dtype: str, n_clients: int, n_requests: int, round_: int) -> tuple:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merged = folder / "merged"
    if not merged.exists():
        call([args.querl.resolve(), "model", "merge", "--model", folder / "model", "--adapter", folder / "run/sft/best", "--out", merged])
    torch.set_num_threads(os.cpu_count())
    tokenizer = AutoTokenizer.from_pretrained(merged)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=kind, attn_implementation="sdpa").eval()

    def generate(numbers: range) -> float:
        prompts = [prompt(number, round_) for number in numbers]
        ids = torch.tensor([tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] for messages in prompts])
        assert ids.shape[1] == N_PROMPT, ids.shape
        started = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(ids, max_new_tokens=N_RESPONSE, min_new_tokens=N_RESPONSE, do_sample=False, pad_token_id=0)
        assert found.shape[1] == N_PROMPT + N_RESPONSE
        return time.perf_counter() - started

    generate(range(n_clients))
    seconds = [generate(range(first, first + n_clients)) for first in range(n_clients, n_clients + n_requests, n_clients)]
    milliseconds = sorted(1000 * second for second in seconds)
    return n_clients * len(seconds) / sum(seconds), statistics.median(milliseconds), milliseconds[-1]


SYSTEMS = {"querl": querl, "llama": llama, "transformers": transformers}


@contextmanager
def server(command: list, listen: Callable[[int], list], ready: str) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tempfile.NamedTemporaryFile("w", prefix="querl-compare-", suffix=".log", delete=False)
    process = subprocess.Popen([str(part) for part in command + listen(port)], stdout=log, stderr=log)
    try:
        for _ in range(3000):
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with {process.returncode}; see {log.name}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port)
                connection.request("GET", ready)
                if connection.getresponse().status == 200:
                    break
            except ConnectionError:
                pass
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


# A digit is one token of the tokenizer, so that the number of tokens is known; 12 belong to the template.
def prompt(number: int, round_: int) -> list[dict]:
    shared = "".join(random.Random(0).choices("0123456789", k=N_SHARED - TEMPLATE_SHARED))
    own = "".join(random.Random(f"{number} {round_}").choices("0123456789", k=N_PROMPT - N_SHARED - TEMPLATE_OWN))
    return [{"role": "system", "content": shared}, {"role": "user", "content": own}]


def template_tokens() -> tuple[int, int]:
    """Number of tokens of the chat template around the two messages; the role names have different numbers of tokens by vocabulary."""
    tokenizer = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    ranks = {tuple(merge): rank for rank, merge in enumerate(tokenizer["model"]["merges"])}

    def n_tokens(word: str) -> int:
        parts = list(word)
        while True:
            pairs = [(ranks[pair], index) for index, pair in enumerate(zip(parts, parts[1:])) if pair in ranks]
            if not pairs:
                return len(parts)
            index = min(pairs)[1]
            parts[index : index + 2] = [parts[index] + parts[index + 1]]

    # Shared by all prompts: <|im_start|> system \n ... <|im_end|> \n, then <|im_start|> user \n.
    shared = 4 + n_tokens("system") + 2 + n_tokens("user")
    return shared, 2 + 2 + n_tokens("assistant")


TEMPLATE_SHARED, TEMPLATE_OWN = template_tokens()


def measure(port: int, bodies: list[dict], n_clients: int, n_requests: int, round_: int) -> tuple[float, float, float]:
    """Requests per second, p50 and p95 in milliseconds. Requests use the bodies in turn."""
    numbers = iter(range(n_clients, n_clients + n_requests))
    latencies: list[float] = []
    problems: list[str] = []
    lock, start = threading.Lock(), threading.Barrier(n_clients + 1)
    warm_up = threading.Semaphore(8)  # at most 8 at once: the first request of each tenant computes its prefix, within the time limit of a response

    def request(connection: http.client.HTTPConnection, number: int) -> None:
        text = json.dumps(bodies[number % len(bodies)] | {"messages": prompt(number, round_)})
        connection.request("POST", "/v1/chat/completions", text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read().decode()
        usage = json.loads(answer).get("usage", {}) if response.status == 200 else {}
        if (usage.get("prompt_tokens"), usage.get("completion_tokens")) != (N_PROMPT, N_RESPONSE):
            problems.append(f"{response.status} {answer[:300]}")

    def client(index: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        with warm_up:
            for number in range(index, max(n_clients, len(bodies)), n_clients):
                request(connection, number)
        connection.close()  # servers close idle connections; the next request opens it again
        start.wait()
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            started = time.perf_counter()
            request(connection, number)
            latencies.append(time.perf_counter() - started)

    def reported(index: int) -> None:
        try:
            client(index)
        except (OSError, http.client.HTTPException, threading.BrokenBarrierError) as error:
            problems.append(repr(error))
            start.abort()

    threads = [threading.Thread(target=reported, args=[index]) for index in range(n_clients)]
    for thread in threads:
        thread.start()
    try:
        start.wait()
    except threading.BrokenBarrierError:
        pass  # reported in `problems`
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    if problems:
        raise SystemExit(f"{len(problems)} requests failed: {problems[0]}")
    milliseconds = sorted(1000 * latency for latency in latencies)
    return n_requests / seconds, statistics.median(milliseconds), milliseconds[int(0.95 * (len(milliseconds) - 1))]


if __name__ == "__main__":
    sys.exit(main())
