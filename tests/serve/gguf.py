#!/usr/bin/env python3
"""GGUF files of `querl export gguf` in llama.cpp have the tokens, log-probabilities and responses of querl.

    tests/serve/gguf.py RUN_DIR [--querl PROGRAM]

1. Models with random weights, of every exported architecture and RoPE scaling, with the tokenizer of examples/tiny-qwen3: equal tokens for
   Chinese and mixed texts, and log-probabilities within 1e-3.
2. The trained model of RUN_DIR, a finished run of examples/fivedoctors: equal tokens of its test prompts, and greedy responses equal to those
   of `querl serve rewrite`.
3. The same model in q8_0 loads and generates; the share of equal responses is printed.

Exit code 1 if something differs. Needs requirements-gguf.txt; llama-cpp-python is built from source:
    CMAKE_ARGS=-DGGML_NATIVE=ON pip install -r tests/serve/requirements-gguf.txt
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from llama_cpp import Llama
from safetensors.numpy import load_file, save_file

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "examples/tiny-qwen3"
DECODERS = REPOSITORY / "tests/reference/golden/decoders"
SHAPES = [
    "qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied", "llama-bias", "llama3-scaled", "mistral", "linear", "dynamic",
    "yarn-scaling", "yarn-attention-factor", "window-mistral", "window-qwen3",
]
TEXTS = [
    "胶原蛋白怎么吃",
    "五个女博士的胶原蛋白肽，多少钱？（一盒）",
    "Query改写：what's the BCAA 2:1:1 ratio, 3 000 mg",
    "<|im_start|>user\n\n你好  hello\n\n\n再见<|im_end|>\n",
    "we've 'test' 2025年11月26日 13800138000",
    "…… “引号”、《书名》——！！℃ ①②\t制表",
]
LIMIT = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--querl", default=REPOSITORY / "target/release/querl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        failures = sum(compare_shape(args.querl, name, Path(folder) / name) for name in SHAPES)
        failures += compare_run(args.querl, args.run.resolve(), Path(folder))
    print(f"{failures} differences")
    return 1 if failures else 0


def compare_shape(querl: Path, name: str, model: Path) -> int:
    random_model(name, model)
    path = export(querl, model, "f32")
    config = json.loads((model / "config.json").read_text())
    window = config.get("sliding_window") if name.startswith("window") else None
    positions = window or config["max_position_embeddings"]
    lines = model / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    output = run([querl, "model", "logprobs", "--model", model, "--input", lines]).splitlines()
    llama = open_llama(path, positions)
    n_wrong, worst, n_tokens = 0, 0.0, 0
    for text, line in zip(TEXTS, map(json.loads, output), strict=True):
        ids = llama.tokenize(text.encode(), add_bos=False, special=True)
        if ids != line["token_ids"]:
            print(f"  {name}: {text!r} is {ids} in llama.cpp, {line['token_ids']} in querl")
            n_wrong += 1
            continue
        ids = ids[:positions]
        found = logprobs(llama, ids)
        expected = np.array(line["logprobs"][1 : len(ids)], dtype=np.float64)
        worst = max(worst, float(np.abs(found - expected).max()))
        n_tokens += len(ids)
    n_wrong += worst > LIMIT
    print(f"{name}: {n_tokens} tokens of {len(TEXTS)} texts, log-probabilities differ by {worst:.1e} at most")
    return n_wrong


def random_model(name: str, folder: Path) -> None:
    """A model with the shapes of a golden checkpoint, the vocabulary of the tiny model, and random weights."""
    folder.mkdir()
    config = json.loads((DECODERS / name / "config.json").read_text())
    tiny = json.loads((TINY / "config.json").read_text())
    old, config["vocab_size"] = config["vocab_size"], tiny["vocab_size"] + 8
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[key] = tiny[key]
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / file, folder / file)
    random = np.random.default_rng(7)
    tensors = {}
    for key, value in load_file(DECODERS / name / "model.safetensors").items():
        shape = tuple(config["vocab_size"] if size == old and "proj" not in key and len(value.shape) == 2 else size for size in value.shape)
        is_norm = len(shape) == 1 and "norm" in key
        values = random.normal(1.0 if is_norm else 0.0, 0.3, shape)
        tensors[key] = values.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")


def compare_run(querl: Path, run_dir: Path, folder: Path) -> int:
    config = (run_dir / "config.resolved.toml").read_text().splitlines()
    tenant = next(line for line in config if line.startswith("tenant = ")).split('"')[1]
    max_tokens = next(int(line.split("=")[1]) for line in config if line.startswith("max_new_tokens"))
    rows = [json.loads(line) for line in (run_dir / "data/test.jsonl").open(encoding="utf-8")]
    prompts = [[message for message in row["messages"] if message["role"] != "assistant"] for row in rows]
    expected = served(querl, run_dir, tenant, prompts, max_tokens)
    n_wrong = 0
    for dtype in ("f32", "q8_0"):
        llama = open_llama(export(querl, run_dir, dtype, folder / f"run-{dtype}.gguf"), 512)
        n_equal = 0
        for prompt, response in zip(prompts, expected, strict=True):
            text = generate(llama, prompt, max_tokens)
            n_equal += text == response
            if text != response and dtype == "f32" and n_wrong < 5:
                print(f"  {prompt[-1]['content'][:60]!r}: {text!r} of llama.cpp, {response!r} of querl")
            n_wrong += dtype == "f32" and text != response
        print(f"{run_dir.name} in {dtype}: {n_equal} of {len(prompts)} greedy responses are those of querl")
        n_wrong += n_equal == 0
    return n_wrong


def served(querl: Path, run_dir: Path, tenant: str, prompts: list[list[dict]], max_tokens: int) -> list[str]:
    """Greedy responses of `querl serve rewrite` to conversations."""
    command = [querl, "serve", "rewrite", run_dir, "--addr", "127.0.0.1:0"]
    server = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    try:
        connection = http.client.HTTPConnection(server.stdout.readline().split("http://")[1].strip())
        while ask(connection, "GET", "/ready")[0] != 200:
            time.sleep(0.05)
        texts = []
        for prompt in prompts:
            body = {"model": tenant, "messages": prompt, "temperature": 0, "max_tokens": max_tokens}
            status, response = ask(connection, "POST", "/v1/chat/completions", body)
            assert status == 200, response
            texts.append(json.loads(response)["choices"][0]["message"]["content"])
        return texts
    finally:
        server.terminate()
        server.wait()


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: dict | None = None) -> tuple[int, str]:
    connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read().decode()


def generate(llama: Llama, messages: list[dict], max_tokens: int) -> str:
    """Generates with llama.cpp's chat template and greedy decoding."""
    llama.reset()
    response = llama.create_chat_completion(messages, temperature=0, max_tokens=max_tokens, repeat_penalty=1.0)
    return response["choices"][0]["message"]["content"]


def open_llama(path: Path, n_positions: int) -> Llama:
    # A KV cache in f32, as in querl.
    return Llama(str(path), n_ctx=n_positions, logits_all=True, type_k=0, type_v=0, verbose=False, n_threads=2)


def logprobs(llama: Llama, ids: list[int]) -> np.ndarray:
    """Log-probabilities of all tokens except the first."""
    llama.reset()
    llama.eval(ids)
    logits = llama.scores[: len(ids) - 1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits[np.arange(len(ids) - 1), ids[1:]]


def export(querl: Path, model: Path, dtype: str, path: Path | None = None) -> Path:
    path = path or model / f"{dtype}.gguf"
    run([querl, "export", "gguf", model, "--out", path, "--dtype", dtype])
    return path


def run(command: list) -> str:
    return subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
