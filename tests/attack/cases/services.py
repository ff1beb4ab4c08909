"""External services that fail, budgets, and querl's servers."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

from cases import results
from project import EXAMPLE, N_ROWS, OPENAI, Project, Service, completion

COST_OF_A_CALL = (100 * 2.0 + 10 * 10.0) / 1e6


def with_teacher(url: str, more: str = "") -> Project:
    return Project().edit('kind = "recorded"\npath = "teacher.jsonl"', f"{OPENAI.format(url=url)}\n").edit("api_key_env", f"{more}\napi_key_env")


def budgets(tally) -> None:
    """Repeated kill -9 does not spend more than the budget."""

    def slow(body: dict, _index: int) -> tuple[int, bytes]:
        time.sleep(0.1)
        return 200, completion(body)

    with Service(slow) as service, with_teacher(service.url, "max_concurrent = 4\nmax_tokens = 10") as project:
        budget, numbers = 0.009, random.Random(2)
        args = ["rewrite", "querl.toml", "--set", f"budget={budget}", "--set", "cache.enabled=false"]
        for _ in range(12 * tally.factor):
            end = project.interrupted(*args, after_s=numbers.uniform(0.1, 0.8), sent=signal.SIGKILL)
            if end.code is not None and end.code >= 0:
                # If the budget is spent, the process ends before the kill.
                tally.attack("kill -9 of paid calls", end.problem(3, "budget"))
        end = project.querl(*args)
        spent = len(service.requests) * COST_OF_A_CALL
        tally.attack("the end under the budget", end.problem(3, "budget"))
        tally.attack(f"{spent:.4f} of {budget} spent", None if spent <= budget + 1e-9 else "more than the budget")
        end = project.querl("rewrite", "querl.toml", "--set", "budget=1")
        rows = [row["id"] for row in project.rows("run/data/rewrites.jsonl")]
        tally.attack("a higher budget resumes", end.problem(0) or (None if len(rows) == len(set(rows)) == N_ROWS else f"{len(rows)} rows"))


def waiting_scores(tally) -> None:
    """kill -9 during judge requests: paid judgements are not requested again, and the results equal those of an uninterrupted run."""

    def judge(body: dict, _index: int) -> tuple[int, bytes]:
        time.sleep(0.3)
        choice = {"message": {"role": "assistant", "content": '{"综合得分": 4.0, "理由": "好"}'}, "finish_reason": "stop"}
        return 200, json.dumps({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode()

    with Service(judge) as service, Project(finished="sft") as project, Project(finished="sft") as whole:
        sets = [
            "judge.kind=openai",
            f"judge.base_url={service.url}/v1",
            "judge.model=j",
            'judge.api_key_env=""',
            "judge.sample_rate=1.0",
            "judge.max_concurrent=1",
            "rl.batch_size=8",
            "cache.path=answers.redb",
        ]
        args = ["rl", "querl.toml", *(word for text in sets for word in ("--set", text))]
        n_killed = 0
        for after_s in (3.0, 4.0, 5.0, 4.0):
            n_killed += project.interrupted(*args, after_s=after_s, sent=signal.SIGKILL).code == -9
        end = project.querl(*args)
        asked = [json.dumps(body) for body in service.requests]
        never_killed = whole.querl(*args)
        tally.attack("the end after kills in waiting", never_killed.problem(0) or results.difference(project, results.trained(whole)))
        n_twice = len(asked) - len(set(asked))
        # A call in progress at a kill may be sent again.
        problem = None if n_twice <= n_killed else f"{n_twice} calls were paid twice with {n_killed} kills"
        problem = problem if asked and n_killed else "no judgement was awaited at a kill"
        tally.attack(f"{len(asked)} judgements, {n_killed} kills", end.problem(0) or problem)


def answer(content: object, **more: object) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}, "finish_reason": "stop"}], **more}).encode()


# Invalid responses after which a retry succeeds.
PASSING = {
    "null content": (200, answer(None)),
    "no choices": (200, b'{"choices": []}'),
    "broken UTF-8": (200, b'{"choices": [{"message": {"content": "\xff\xfe"}}]}'),
    "half an object": (200, b'{"choices": [{"mess'),
    "an empty body": (200, b""),
    "HTML": (200, b"<html>gateway</html>"),
    "500": (500, b"{}"),
    "429": (429, b"{}"),
    "503": (503, b"x" * 100000),
}


def bad_answers(tally) -> None:
    for name, (status, content) in PASSING.items():
        seen: set[str] = set()

        def once(body: dict, _index: int, status=status, content=content, seen=seen) -> tuple[int, bytes]:
            key = json.dumps(body["messages"])
            if key in seen:
                return 200, completion(body)
            seen.add(key)
            return status, content

        with Service(once) as service, with_teacher(service.url, "max_retries = 5\ntimeout_s = 2.0\nmax_concurrent = 10") as project:
            end = project.querl("rewrite", "querl.toml")
            n_ok = sum("Ok" in row["rewrite"] for row in project.rows("run/data/rewrites.jsonl")) if end.code == 0 else 0
            tally.attack(f"a first answer of {name}", end.problem(0) or (None if n_ok == N_ROWS else f"{n_ok} of {N_ROWS} rows"))
    for name, (status, content) in {"an endless wait": (0, b""), "400": (400, b'{"error": {"message": "no"}}'), "401": (401, b"{}")}.items():

        def always(_body: dict, _index: int, status=status, content=content) -> tuple[int, bytes]:
            if status == 0:
                time.sleep(5)
            return status or 500, content

        with Service(always) as service, with_teacher(service.url, "max_retries = 1\ntimeout_s = 0.5\nmax_concurrent = 20") as project:
            end = project.querl("rewrite", "querl.toml", limit_s=120)
            tally.attack(f"{name} for every row", end.problem(2) if end.code else "exit code 0")


def metrics(tally) -> None:
    with Service(lambda body, _index: (200, completion(body))) as service, with_teacher(service.url) as project:
        end = project.querl("run", "querl.toml", "--to", "rl")
        tally.attack("a run with a service", end.problem(0))
        lines = project.rows("run/metrics.jsonl")
        names = {name for line in lines if line["stage"] == "rewrite" for name in {**line, **line.get("metrics", {})}}
        for name in ("calls/teacher m/calls", "calls/teacher m/cost", "cache/rewrites/hit_rate"):
            tally.attack(f"`{name}` in metrics.jsonl", None if name in names else str(sorted(names)))


class Server:
    def __init__(self, project: Project, *args: str, env: dict[str, str] | None = None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = project.start(*args, "--addr", f"127.0.0.1:{self.port}", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env or {})

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 60
        while self.get("/ready")[0] != 200:
            assert time.monotonic() < deadline and self.process.poll() is None, "the server is not ready"
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(90)

    def get(self, route: str) -> tuple[int, str]:
        return self.send(urllib.request.Request(self.url + route))

    def post(self, route: str, body: bytes, **headers: str) -> tuple[int, str]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send(urllib.request.Request(self.url + route, body, {"content-type": "application/json", **named}))

    def send(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def half_sent(self, n: int) -> list[socket.socket]:
        sockets = []
        for _ in range(n):
            connection = socket.create_connection(("127.0.0.1", self.port))
            connection.sendall(b"POST /v1/rewrite HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n")
            sockets.append(connection)
        return sockets


BODIES = {
    "no JSON": (b"{", 400),
    "a list": (b"[]", 422),
    "an unknown tenant": (b'{"query": "x", "tenant": "none"}', 404),
    "an empty query": (b'{"query": ""}', 422),
    "a number as query": (b'{"query": 3}', 422),
    "U+0000": (b'{"query": "a\\u0000b"}', 422),
    "a lone surrogate": (b'{"query": "\\ud800"}', 400),
    "deep JSON": (b'{"query": ' + b"[" * 50000 + b"]" * 50000 + b"}", 400),
    "a long query": (json.dumps({"query": "长" * 200000}, ensure_ascii=False).encode(), 422),
    "a large body": (b'{"query": "' + b"x" * (2 << 20) + b'"}', 413),
}


def servers(tally) -> None:
    with Project(finished="eval") as project:
        with Server(project, "serve", "rewrite", "run", "--api_key_env", "KEY", env={"KEY": "secret"}) as server:
            for name, (body, status) in BODIES.items():
                found, text = server.post("/v1/rewrite", body, authorization="Bearer secret")
                rust = any(word in text for word in ("struct", "panicked", "serde"))
                tally.attack(f"serve rewrite: {name}", None if found == status and not rust else f"{found} and not {status}: {text[:200]}")
            for header, status in (("bearer secret", 200), ("BEARER secret", 200), ("Bearer wrong", 401), ("Basic secret", 401), ("", 401)):
                found, _ = server.post("/v1/rewrite", '{"query": "鱼油"}'.encode(), authorization=header)
                tally.attack(f"authorization {header!r}", None if found == status else f"{found} and not {status}")
            held = server.half_sent(600)
            started = time.monotonic()
            found, _ = server.get("/health")
            seconds = time.monotonic() - started
            tally.attack("/health with 600 half-sent requests", None if found == 200 and seconds < 1 else f"{found} after {seconds:.1f} s")
            for connection in held:
                connection.close()
        with Server(project, "serve", "rag", str(EXAMPLE / "serve.toml")) as server:
            for name, (body, _) in BODIES.items():
                found, text = server.post("/api/chat/general_rag", body)
                rust = any(word in text for word in ("struct", "panicked", "serde"))
                tally.attack(f"serve rag: {name}", None if 400 <= found < 500 and not rust else f"{found}: {text[:200]}")
            server.process.terminate()
            code = server.process.wait(20)
            tally.attack("SIGTERM ends a server well", None if code == 0 else f"exit code {code}")


GROUPS = {
    "money": [budgets, waiting_scores],
    "services that fail": [bad_answers, metrics],
    "servers": [servers],
}
