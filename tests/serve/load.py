#!/usr/bin/env python3
"""Load test of `querl serve rewrite`: requests per second, latencies, and whether every rewrite equals that of the run's evaluation.

    tests/serve/load.py RUN_DIR... [--querl PROGRAM] [--clients 1 8 64] [--requests 2000] [--copies N] [--replace SECONDS] [--set ...]

Starts the server on the given runs, and sends the queries of `eval/records.jsonl` to their tenants in turn, without the cache of rewrites.
`--copies N` serves N tenants, copies of the first run under other names. `--replace SECONDS` reloads the runs at this interval, by the admin
route. Exit code 1 if a request failed or a rewrite differs. Needs Python 3.11 only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer admin"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--querl", default="target/release/querl")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=2000, help="for each number of clients")
    parser.add_argument("--copies", type=int, default=0)
    parser.add_argument("--replace", type=float, default=0.0)
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = copies(args.runs[0], args.copies, Path(folder)) if args.copies else [run.resolve() for run in args.runs]
        cases = interleaved([evaluated(run) for run in runs])
        command = [args.querl, "serve", "rewrite", *map(str, runs), "--addr", "127.0.0.1:0", "--cache", "0"]
        command += ["--deadline_ms", "60000", "--admin_key_env", "ADMIN_KEY", *more]
        started = time.perf_counter()
        server = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "ADMIN_KEY": "admin"}, text=True)
        try:
            address = server.stdout.readline().split("http://")[1].strip()
            while post(address, "GET", "/ready")[0] != 200:
                time.sleep(0.01)
            print(f"{len(runs)} tenants, ready after {time.perf_counter() - started:.2f} s, {memory(server.pid)}")
            failures = sum(measure(address, cases, clients, args, runs) for clients in args.clients)
            print(f"at the end {memory(server.pid)}")
        finally:
            server.terminate()
            server.wait()
    return 1 if failures else 0


def copies(run: Path, n: int, folder: Path) -> list[Path]:
    """`n` copies of a run, each with its own tenant."""
    found = []
    for index in range(n):
        copy = folder / f"run{index}"
        shutil.copytree(run, copy)
        config = copy / "config.resolved.toml"
        lines = config.read_text().splitlines(keepends=True)
        lines = [f'tenant = "tenant-{index}"\n' if line.startswith("tenant = ") else line for line in lines]
        config.write_text("".join(lines))
        found.append(copy)
    return found


def evaluated(run: Path) -> list[tuple[bytes, str]]:
    """Requests with the queries of a run's evaluation, and the expected rewrites."""
    lines = (run / "config.resolved.toml").read_text().splitlines()
    tenant = next(line for line in lines if line.startswith("tenant = ")).split('"')[1]
    records = [json.loads(line) for line in (run / "eval/records.jsonl").open(encoding="utf-8")]
    system = "rl" if any(record["system"] == "rl" for record in records) else "sft"
    cases = []
    for record in records:
        if record["system"] == system and "Ok" in record["outcome"]:
            query = record["query"]
            body = {"tenant": tenant, "query": query["original_query"]}
            body |= {"user_profile": query.get("user_profile"), "history": query.get("history_summary")}
            rewrite = record["outcome"]["Ok"]["candidate"].get("rewrite") or query["original_query"]
            cases.append((json.dumps(body).encode(), rewrite))
    return cases


def interleaved(of_tenants: list[list[tuple[bytes, str]]]) -> list[tuple[bytes, str]]:
    return [cases[i % len(cases)] for i in range(max(map(len, of_tenants))) for cases in of_tenants]


def measure(address: str, cases: list[tuple[bytes, str]], n_clients: int, args: argparse.Namespace, runs: list[Path]) -> int:
    latencies: list[float] = []
    wrong: list[str] = []
    numbers = iter(range(args.requests))
    lock = threading.Lock()
    is_done = threading.Event()

    def client() -> None:
        connection = http.client.HTTPConnection(address)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            body, expected = cases[number % len(cases)]
            started = time.perf_counter()
            connection.request("POST", "/v1/rewrite", body, HEADERS)
            response = connection.getresponse()
            text = response.read()
            latencies.append(time.perf_counter() - started)
            if response.status != 200 or json.loads(text)["rewrite"] != expected:
                wrong.append(f"{response.status} {text.decode()[:300]}, expected {expected}")

    def operator() -> None:
        n_loaded = 0
        while not is_done.wait(args.replace):
            status, text = post(address, "POST", "/admin/tenants", json.dumps({"path": str(runs[n_loaded % len(runs)])}))
            n_loaded += 1
            if status not in (200, 201):
                wrong.append(f"replacement: {status} {text}")
        print(f"  {n_loaded} replacements")

    threads = [threading.Thread(target=client) for _ in range(n_clients)]
    replacing = threading.Thread(target=operator) if args.replace else None
    started = time.perf_counter()
    for thread in [*threads, *([replacing] if replacing else [])]:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    is_done.set()
    if replacing:
        replacing.join()
    milliseconds = sorted(1000 * latency for latency in latencies)
    p95 = milliseconds[int(0.95 * (len(milliseconds) - 1))]
    print(
        f"{n_clients:3} clients: {args.requests / seconds:7.1f} requests/s, p50 {statistics.median(milliseconds):7.1f} ms, "
        f"p95 {p95:7.1f} ms, {len(wrong)} of {args.requests} failed or not as in eval"
    )
    for line in wrong[:3]:
        print(f"  {line}", file=sys.stderr)
    return len(wrong)


def post(address: str, method: str, path: str, body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address)
    connection.request(method, path, body, HEADERS)
    response = connection.getresponse()
    return response.status, response.read().decode()


def memory(pid: int) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("VmRSS")).replace("\t", " ")


if __name__ == "__main__":
    sys.exit(main())
