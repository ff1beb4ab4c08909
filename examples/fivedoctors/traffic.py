#!/usr/bin/env python3
"""Simulated users of a rewriting service: sends the queries of a run to it, and clicks on their gold passages.

    examples/fivedoctors/traffic.py RUN_DIR [--url http://127.0.0.1:8000] [--click 1.0] [--requests N] [--seed 0]

Each query of `data/rewrites.jsonl` is sent once, by a user of its own. A share of `--click` is followed by feedback to `POST /v1/feedback`: a
click on the gold passages of the query table. Real users click on what they were shown, and not always on what is right. Needs Python 3.9 alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--click", type=float, default=1.0, help="share of requests with a simulated click")
    parser.add_argument("--requests", type=int, default=sys.maxsize, help="at most this number")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines = (args.run / "data" / "rewrites.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines][: args.requests]
    wait_until_ready(args.url)
    chance = random.Random(args.seed)
    n_fallbacks = n_clicks = 0
    started = time.perf_counter()
    for number, row in enumerate(rows):
        query = {
            "query": row["original_query"],
            "user_profile": row["user_profile"],
            "history": row["history_summary"],
            "user": f"simulated-{number}",
        }
        rewrite = post(args.url + "/v1/rewrite", query)
        n_fallbacks += rewrite["fallback"] is not None
        if row["gold_ids"] and chance.random() < args.click:
            feedback = {"id": rewrite["id"], "tenant": rewrite["tenant"], "clicked": row["gold_ids"]}
            n_clicks += post(args.url + "/v1/feedback", feedback)["accepted"]
    seconds = time.perf_counter() - started
    print(f"{len(rows)} requests, {n_fallbacks} fallbacks, {n_clicks} simulated clicks in {seconds:.1f} s")
    return 0


def wait_until_ready(url: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(url + "/ready", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    sys.exit(f"{url}/ready: the server is not ready after a minute")


def post(url: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json"}
    if os.environ.get("API_KEY"):
        headers["Authorization"] = "Bearer " + os.environ["API_KEY"]
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        sys.exit(f"{url}: status {error.code}: {error.read().decode(errors='replace')}")


if __name__ == "__main__":
    sys.exit(main())
