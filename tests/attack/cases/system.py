"""The terminal, signals, limits of the shell, read-only folders, arguments."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time

from project import MODEL, PLUGINS, QUERL, Project

LONG_SFT = ["run", "querl.toml", "--to", "sft", "--set", "sft.max_steps=100000", "--set", "sft.epochs=100000"]


# Redirections of a short run's output, as the end of a shell command.
LOST_OUTPUTS = {
    "a reader of stderr that leaves": "2>&1 >/dev/null | head -1 >/dev/null",
    "a reader of stdout that leaves": "--json | head -c 1 >/dev/null",
    "a full disk behind stderr": "2>/dev/full >/dev/null",
    "a closed stderr": "2>&- >/dev/null",
    "a closed stdin": "<&- >/dev/null 2>&1",
}


def lost_outputs(tally) -> None:
    for name, end in LOST_OUTPUTS.items():
        with Project() as project:
            status = subprocess.run(
                ["bash", "-c", f'"$0" run querl.toml --to sft {end}; exit "${{PIPESTATUS[0]}}"', QUERL],
                cwd=project.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ).returncode
            # A closed pipe of stdout is an error, but only at the end of the run.
            allowed = (0, 1) if "stdout" in name else (0,)
            done = project.path("run/sft/best").is_dir()
            tally.attack(name, None if status in allowed and done else f"exit code {status}, sft finished: {done}")


# ulimit, command, exit code, message.
LIMITS = [
    ("ulimit -v 8388608", ["run", "querl.toml", "--to", "convert"], 0, ""),
    ("ulimit -v 8388608", ["doctor"], 0, "without its pool"),
    ("ulimit -v 1572864", ["run", "querl.toml", "--to", "convert"], (0, 1), ""),
    ("ulimit -v 786432", ["run", "querl.toml", "--to", "sft"], (1, 2), ""),
    ("ulimit -v 393216", ["run", "querl.toml", "--to", "sft"], (1, 2), ""),
    ("ulimit -v 220000", ["run", "querl.toml", "--to", "sft"], (1, 2), ""),
    ("ulimit -v 120000", ["run", "querl.toml", "--to", "sft"], (1, 2), ""),
    ("ulimit -v 393216", ["doctor"], (0, 1), ""),
    ("ulimit -v 131072", ["config", "check", "querl.toml"], (0, 1), ""),
    ("ulimit -s 64", ["run", "querl.toml", "--to", "sft"], 0, ""),
    ("ulimit -s 64", ["config", "schema"], 0, ""),
    ("ulimit -Ss 64", ["plugin", "list", "querl.toml"], 0, ""),
    ("ulimit -t 2", LONG_SFT, 130, "the limit of CPU time (`ulimit -t`) is reached"),
    ("ulimit -t 8", LONG_SFT, 130, "the state is saved"),
    ("ulimit -St 2", LONG_SFT, 130, "the limit of CPU time (`ulimit -t`) is reached"),
    ("ulimit -f 8", ["run", "querl.toml", "--to", "convert"], 1, "File too large"),
    ("ulimit -n 24", ["run", "querl.toml", "--to", "convert"], (0, 1), ""),
    ("ulimit -c 0", ["run", "querl.toml", "--to", "convert"], 0, ""),
]


def limits(tally) -> None:
    for limit, args, code, said in LIMITS:
        with Project() as project:
            end = project.querl(*args, shell=f"{limit};")
            codes = code if isinstance(code, tuple) else (code,)
            problems = [end.problem(code, said) for code in codes]
            tally.attack(f"{limit}; querl {' '.join(args[:3])}", problems[0] if all(problems) else None)
            if "-t 8" in limit:
                again = project.interrupted(*args, after_s=15)
                tally.attack("the same command resumes", None if "resuming from step" in again.err else again.err[-300:])


def too_little_memory(tally) -> None:
    """Weights that cannot be mapped into memory are not reported as damaged. The file is sparse and takes no disk space."""
    with Project() as project:
        weights = project.copy_model("model") / "model.safetensors"
        os.truncate(weights, 64 << 30)
        project.write("texts.jsonl", '{"text": "胶原蛋白"}\n')
        for args in (
            ["model", "inspect", "model"],
            ["model", "logprobs", "--model", "model", "--input", "texts.jsonl"],
            ["run", "querl.toml", "--to", "sft", "--set", 'model.path="model"'],
        ):
            end = project.querl(*args, shell="ulimit -v 16777216;")
            blamed = "the file is blamed" if "damaged" in end.err else None
            tally.attack(f"weights larger than memory: {' '.join(args[:2])}", end.problem(1, "ulimit -v") or blamed)
        for limit in range(80000, 240000, 20000):
            end = project.querl("model", "logprobs", "--model", str(MODEL), "--input", "texts.jsonl", shell=f"ulimit -v {limit};")
            problems = [end.problem(code) for code in (0, 1, 2)]
            tally.attack(f"ulimit -v {limit}; querl model logprobs", problems[0] if all(problems) else None)


def hang_ups(tally) -> None:
    for name, trap, codes in (("nohup", "trap '' HUP;", (0,)), ("a closed terminal", "", (0, 130))):
        with Project() as project:
            script = f'{trap} "$0" run querl.toml --to sft & sleep 0.5; for i in 1 2 3 4 5 6 7 8; do kill -HUP $!; sleep 0.1; done; wait $!'
            status = subprocess.run(["bash", "-c", script, QUERL], cwd=project.folder, capture_output=True).returncode
            tally.attack(f"SIGHUP again and again, {name}", None if status in codes else f"exit code {status}")


SLOW_TEMPLATE = "{% for i in range(20000) %}{% endfor %}"


def one_interrupt(tally) -> None:
    """Commands without state to save end at the first signal."""
    with Project(finished="eval") as project:
        resolved = project.path("run/config.resolved.toml")
        resolved.write_text(resolved.read_text().replace("bootstrap = 50\n", "bootstrap = 1000000\n"))
        template = project.copy_model("slow") / "chat_template.jinja"
        template.write_text(SLOW_TEMPLATE + template.read_text())
        slow = project.path("slow-build")
        (slow / "src").mkdir(parents=True)
        (slow / "Cargo.toml").write_text(
            '[package]\nname = "slow"\nversion = "0.1.0"\nedition = "2024"\n[lib]\ncrate-type = ["cdylib"]\n[workspace]\n'
        )
        (slow / "src/lib.rs").write_text("")
        (slow / "build.rs").write_text("fn main() { std::thread::sleep(std::time::Duration::from_secs(600)); }\n")
        reward = str(PLUGINS / "reward-competition")
        for name, args, after_s in (
            ("the report", ["report", "run"], 1.5),
            ("a chat template", ["run", "querl.toml", "--to", "sft", "--set", 'model.path="slow"'], 0.5),
            ("a build", ["plugin", "build", "slow-build"], 3.0),
            ("many calls of a plugin", ["plugin", "test", reward, "--repeats", "1000000"], 3.0),
            ("a training", LONG_SFT, 4.0),
        ):
            for sent in (signal.SIGINT, signal.SIGTERM):
                for part in (1, 2, 4):  # on a fast machine the command may end before the signal
                    end = project.interrupted(*args, after_s=after_s / part, sent=sent)
                    if end.code != 0:
                        break
                    shutil.rmtree(project.path("run/sft"), ignore_errors=True)
                slow_end = f"it took {end.seconds:.1f} s" if end.seconds > 2 else None
                tally.attack(f"{sent.name} in {name}", end.problem(130) or slow_end)


def arguments(tally) -> None:
    with Project() as project:
        for args in ([b"run", b"\xff\xfe.toml"], [b"run", b"querl.toml", b"--out", b"\xff"], [b"plugin", b"inspect", b"a\xff"]):
            tally.attack(f"the argument {args[-1]!r}", project.querl(*args).problem(2))
        for args in (["run"], ["run", "none.toml"], ["fly"], ["run", "querl.toml", "--set", "sft"], ["run", "querl.toml", "--threads", "x"]):
            end = project.querl(*args)
            tally.attack(" ".join(args), None if end.code == 2 and "panicked" not in end.err else f"{end.code}: {end.err[-200:]}")


def folders(tally) -> None:
    def file_in_place_of(name: str):
        def prepare(project: Project) -> None:
            path = project.path(name)
            shutil.rmtree(path, ignore_errors=True)
            path.write_text("x")

        return prepare

    def folder_in_place_of(name: str):
        def prepare(project: Project) -> None:
            project.path(name).unlink()
            project.path(name).mkdir()

        return prepare

    def content(name: str, value: bytes):
        return lambda project: project.write(name, value)

    for name, prepare, args, codes in (
        ("a ledger that is cut", content("run/stages.json", b"{"), ["run", "querl.toml"], (2,)),
        ("a ledger of random bytes", content("run/stages.json", os.urandom(500)), ["run", "querl.toml"], (2,)),
        ("a ledger that is a list", content("run/stages.json", b"[]"), ["report", "run"], (2,)),
        ("a binary adapter_config.json", content("a/adapter_config.json", os.urandom(64)), ["model", "inspect", "a"], (2,)),
        ("a file as --out", content("out", b"x"), ["run", "querl.toml", "--out", "out"], (2,)),
        ("a folder as report.html", folder_in_place_of("run/report.html"), ["report", "run"], (1, 2)),
        ("a folder as eval.json", folder_in_place_of("run/eval.json"), ["report", "run"], (1, 2)),
        ("a file as rl", file_in_place_of("run/rl"), ["rl", "querl.toml", "--from", "rl"], (0, 1, 2)),
        ("a resolved configuration that is cut", content("run/config.resolved.toml", b"tenant = "), ["report", "run"], (2,)),
        ("a lock file of another program", content("run/querl.lock", b"\x00" * 40), ["run", "querl.toml"], (1, 2)),
        ("no run", lambda project: shutil.rmtree(project.path("run")), ["report", "run"], (2,)),
    ):
        with Project(finished="eval") as project:
            prepare(project)
            end = project.querl(*args)
            problems = [end.problem(code) for code in codes]
            tally.attack(name, problems[0] if all(problems) else None)


def read_only_folders(tally) -> None:
    """A user with read-only access to a run."""
    if os.geteuid() != 0:
        tally.skip("a read-only folder", "another user can be taken by root alone")
        return
    with Project(finished="eval") as project:
        for path in [project.folder, *project.folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        for args in (["report", "run"], ["run", "querl.toml"], ["plugin", "new", "plugin", "--kind", "reward", "--lang", "python"]):
            try:
                end = project.querl(*args, user=65534, group=65534, extra_groups=[], env={"QUERL_CACHE_DIR": "/nonexistent"})
            except PermissionError as error:
                tally.skip("a read-only folder", str(error))
                return
            problems = [end.problem(code, "ermission denied") for code in (1, 2)]
            tally.attack(f"a read-only folder: {args[0]}", problems[0] if all(problems) else None)


def synced_folders(tally) -> None:
    """The folder of each file that was renamed into place is synced afterwards."""
    if not shutil.which("strace"):
        tally.skip("folders that are synced", "strace is not installed")
        return
    with Project() as project:
        traced = ["strace", "-f", "-y", "-o", str(project.path("calls")), "-e", "trace=fsync,rename,renameat,renameat2"]
        end = project.querl(command=[*traced, QUERL, "run", "querl.toml", "--to", "convert"])
        tally.attack("a run under strace", end.problem(0))
        calls = project.path("calls").read_text(errors="replace").splitlines()
        pending: dict[str, set[str]] = {}
        n_renamed = 0
        for call in calls:
            if found := re.search(r"rename\w*\(.*\"([^\"]+)\"", call):
                target = project.folder / found[1]
                # Files of the run only: moving a folder can be repeated.
                if target.is_file() and project.path("run") in target.parents:
                    pending.setdefault(str(target.parent.resolve()), set()).add(target.name)
                    n_renamed += 1
            elif found := re.search(r"fsync\(\d+<([^>]+)>", call):
                pending.pop(found[1], None)
        few = f"only {n_renamed} files were renamed" if n_renamed < 5 else None
        tally.attack(f"{n_renamed} files renamed into place", few or (f"not synced: {pending}" if pending else None))


def two_processes(tally) -> None:
    with Project() as project:
        first = project.start(*LONG_SFT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(2)
        tally.attack("a second process on one folder", project.querl("run", "querl.toml").problem(1, "in use"))
        first.send_signal(signal.SIGTERM)
        first.wait(20)


GROUPS = {
    "terminals, signals, limits": [lost_outputs, limits, too_little_memory, hang_ups, one_interrupt],
    "arguments and folders": [arguments, folders, read_only_folders, synced_folders, two_processes],
}
