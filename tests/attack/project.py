"""Shared by the attacks: a small project for the built program, the result of a command, fake services."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUERL = os.environ.get("QUERL", str(ROOT / "target/release/querl"))
EXAMPLE = ROOT / "examples/fivedoctors"
MODEL = ROOT / "examples/tiny-qwen3"
PLUGINS = ROOT / "plugins"
N_ROWS = 40

# The configuration of the command-line tests with another length: the model of the example has 512 positions.
CONFIG = (ROOT / "host/querl/tests/support/querl.toml").read_text().replace("max_length = 4096\n", "")
for name, path in {"example": EXAMPLE, "plugins": PLUGINS, "model": MODEL}.items():
    CONFIG = CONFIG.replace("{" + name + "}", str(path))
OPENAI = """kind = "openai"
base_url = "{url}/v1"
model = "m"
api_key_env = ""
price_prompt_per_million = 2.0
price_completion_per_million = 10.0
[cache]
path = "answers.redb\""""


@dataclass
class End:
    """The result of a command. `code` is negative after a signal, None after the time limit."""

    code: int | None
    out: str
    err: str
    memory_mib: float
    seconds: float

    def problem(self, code: int, *texts: str) -> str | None:
        """Describes the deviation from the expectation; None if the exit code is `code` and stderr ends with one sentence that contains `texts`."""
        last = self.err.rstrip().rsplit("\n", 1)[-1]
        if self.code != code:
            return f"exit code {self.code} and not {code}: {last[:300]}"
        # A panic of a guest is part of the sentence about its plugin.
        if any(line.startswith("thread '") and "panicked at" in line for line in self.err.splitlines()):
            return f"a panic: {self.err[-300:]}"
        if code not in (0, 130) and not last.startswith("error: "):
            return f"the last line is no sentence: {last[:300]!r}"
        missing = [text for text in texts if text not in self.err + self.out]
        return f"{missing} is not in {(self.out + self.err)[-600:]!r}" if missing else None


class Project:
    """A folder with a configuration, the first forty queries of the example and a recorded teacher."""

    _finished: dict[str, Path] = {}

    def __init__(self, config: str = CONFIG, finished: str | None = None):
        """`finished`: with a finished run up to this stage, which is created once."""
        self.folder = Path(tempfile.mkdtemp(prefix="querl-attack-"))
        rows = (EXAMPLE / "teacher_rewrites.jsonl").read_text().splitlines()[:N_ROWS]
        for name in ("queries.jsonl", "teacher.jsonl"):
            self.write(name, "\n".join(rows))
        self.write("querl.toml", config)
        if finished:
            if finished not in Project._finished:
                first = Project()
                end = first.querl("run", "querl.toml", "--to", finished)
                assert end.code == 0, end
                Project._finished[finished] = first.folder / "run"
            shutil.copytree(Project._finished[finished], self.folder / "run")

    def __enter__(self) -> Project:
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder / "run" not in Project._finished.values():
            shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, name: str) -> Path:
        return self.folder / name

    def write(self, name: str, content: str | bytes) -> None:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_bytes(content if isinstance(content, bytes) else content.encode())

    def edit(self, before: str, after: str) -> Project:
        text = self.path("querl.toml").read_text()
        assert before in text, before
        self.write("querl.toml", text.replace(before, after, 1))
        return self

    def rows(self, name: str) -> list[dict]:
        return [json.loads(line) for line in self.path(name).read_text().splitlines()]

    def copy_model(self, name: str) -> Path:
        shutil.copytree(MODEL, self.path(name))
        return self.path(name)

    def start(self, *args: str | bytes, **options: object) -> subprocess.Popen:
        command = options.pop("command", [QUERL, *args])
        environment = {**os.environ, "QUERL_CACHE_DIR": str(ROOT / "target/attack-cache"), **options.pop("env", {})}
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, **options)

    def querl(self, *args: str | bytes, shell: str = "", limit_s: float = 300, **options: object) -> End:
        """Runs the program. `shell`: commands before it in the same shell (`ulimit -t 2;`)."""
        if shell:
            options["command"] = ["bash", "-c", f'{shell} exec "$0" "$@"', QUERL, *args]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = self.start(*args, **{"stdout": out, "stderr": err, **options})
            return ended(process, out, err, limit_s)

    def interrupted(self, *args: str, after_s: float, sent: signal.Signals = signal.SIGINT, limit_s: float = 60) -> End:
        """Sends a signal after `after_s`; `seconds` is the time from the signal to the end."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = self.start(*args, stdout=out, stderr=err)
            try:
                process.wait(after_s)
            except subprocess.TimeoutExpired:
                process.send_signal(sent)
            return ended(process, out, err, limit_s)

    def snapshot(self, folder: str = "run") -> dict[str, str]:
        """Digests of all files except the lock file."""
        files = [path for path in self.path(folder).rglob("*") if path.is_file() and path.name != ".in-use"]
        return {str(path.relative_to(self.folder)): digest(path) for path in files}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ended(process: subprocess.Popen, out, err, limit_s: float) -> End:
    started = time.monotonic()
    while (waited := os.wait4(process.pid, os.WNOHANG) if process.returncode is None else None) and waited[0] == 0:
        if time.monotonic() - started > limit_s:
            process.kill()
            waited = (0, None, os.wait4(process.pid, 0)[2])
            break
        time.sleep(0.01)
    seconds = time.monotonic() - started
    if waited is None:
        code, memory = process.returncode, 0.0
    else:
        code = None if waited[1] is None else os.waitstatus_to_exitcode(waited[1])
        process.returncode, memory = code if code is not None else -9, waited[2].ru_maxrss / 1024
    texts = []
    for file in (out, err):
        file.seek(0)
        texts.append(file.read().decode(errors="replace"))
    return End(code, texts[0], texts[1], memory, seconds)


class Service:
    """An HTTP service on loopback. `answer(body, index)` gives `(status, bytes)`, and may sleep."""

    def __init__(self, answer):
        self.requests: list[dict] = []
        lock, requests = threading.Lock(), self.requests

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    index = len(requests)
                    requests.append(body)
                status, content = answer(body, index)
                try:
                    self.send_response(status)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    pass  # the client was killed

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def completion(body: dict, n_prompt: int = 100, n_response: int = 10) -> bytes:
    """A response of a chat service, with a different rewrite for each prompt."""
    text = "鱼油 食用方法 " + hashlib.sha256(json.dumps(body["messages"]).encode()).hexdigest()[:8]
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_response}}).encode()
