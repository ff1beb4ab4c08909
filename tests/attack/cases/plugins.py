"""Untrusted plugins: folders with the names of files, faults in a run, plugins in JavaScript and Python, keys and locks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from project import PLUGINS, ROOT, Project

REWARD = f"{PLUGINS}/reward-competition"
EPISODES = str(ROOT / "examples/hello-reward/episodes.jsonl")


def folders_named_as_files(tally) -> None:
    with Project() as project:
        # A fake `cargo` that creates a file when it is executed.
        project.write("bin/cargo", f"#!/bin/sh\necho >> '{project.path('built')}'\nexit 1\n")
        project.path("bin/cargo").chmod(0o755)
        environment = {"PATH": f"{project.path('bin')}:{os.environ['PATH']}"}
        for name in ("x.querl", "x.wasm", "X.WASM"):
            shutil.copytree(REWARD, project.path(name), ignore=shutil.ignore_patterns("target", "dist"))
            config = project.path("querl.toml").read_text().replace(REWARD, name)
            project.write("other.toml", config)
            for args in (
                ["plugin", "inspect", name],
                ["plugin", "test", name],
                ["plugin", "bench", name],
                ["plugin", "build", name],
                ["plugin", "replay", EPISODES, "--plugin", name],
                ["plugin", "list", "other.toml"],
                ["config", "check", "other.toml"],
                ["run", "other.toml"],
                ["run", "other.toml", "--dry-run"],
            ):
                problem = project.querl(*args, env=environment).problem(2, name)
                built = "it was built" if project.path("built").exists() else None
                tally.attack(f"a folder {name}: {' '.join(args[:2])}", problem or built)


# The violation of the reward tests/guests/odd-reward, and the message of the run.
BREACHES = {
    "huge_range": "declares the range",
    "empty_range": "range",
    "huge_component": "expected at most 1e18 in magnitude",
    "many_components": "expected at most 64",
    "many_names": "one name more than the 256",
    "looks_at_neighbours": None,
    "counts_hits": None,
    "quadratic": None,
}
EVAL = ["eval", "querl.toml", "--set", 'eval.systems=["raw", "teacher"]']


def faults_of_rewards(tally) -> None:
    for breach, said in BREACHES.items():
        with Project() as project:
            project.edit(REWARD, str(ROOT / "tests/guests/odd-reward"))
            with project.path("querl.toml").open("a") as config:
                config.write(f'settings = {{ breach = "{breach}" }}\n')
            end = project.querl("run", "querl.toml", "--to", "convert")
            end = project.querl(*EVAL) if end.code == 0 else end
            if said is None:
                tally.attack(f"a reward that {breach}", None if end.code in (0, 1) and "panicked at" not in end.err else end.err[-300:])
            else:
                codes = [end.problem(code, said) for code in (1, 2)]
                tally.attack(f"a reward that {breach}", codes[0] if all(codes) else None)
            for path in project.path("run/faults").glob("*"):
                again = project.querl("plugin", "replay", str(path))
                # Component names are counted over all calls of a run; a replay is one call.
                tally.attack(f"a replay of {breach}", again.problem(0 if breach == "many_names" else 1, "odd-reward"))


SCORER = """//! Breaks the rule that its setting `breach` names.

use querl_sdk::{Dialogue, Rejection, Score, SettingError, Settings, StyleModel, StyleScorer};

struct Guest(String);

impl StyleScorer for Guest {
    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self(settings.text("label", "售前")))
    }

    fn score(&self, dialogue: &Dialogue, model: &dyn StyleModel) -> Result<Score, Rejection> {
        let classes = model.classify(&dialogue.turns).map_err(|error| Rejection::new("no_style", error.to_string()))?;
        let total = classes[0].probability;
        match self.0.as_str() {
            "panics" => panic!("cannot score {} turns", dialogue.turns.len()),
            "loops" => loop {
                std::hint::black_box(total);
            },
            "allocates" => Ok(Score::new(vec![1.0_f64; std::hint::black_box(1 << 30)].iter().sum())),
            "nan" => Ok(Score::new(f64::NAN)),
            "above" => Ok(Score::new(7.0)),
            "asks" => {
                (0..100_000).for_each(|_| drop(std::hint::black_box(model.classify(&dialogue.turns))));
                Ok(Score::new(total))
            }
            "rejects" => Err(Rejection::new("never", "")),
            _ => Ok(Score::new(total)),
        }
    }
}

querl_sdk::export!(style_scorer: Guest);
"""


def faults_of_style_scorers(tally) -> None:
    with Project() as project:
        shutil.copy(ROOT / "examples/style/seed26.json", project.path("dialogues.json"))
        training = ["--train_file", "dialogues.json", "--output_dir", "style", "--num_train_epochs", "1"]
        end = project.querl("style", "train", str(ROOT / "examples/style/classifier.toml"), *training)
        tally.attack("a style model", end.problem(0))
        project.querl("plugin", "new", "scorer", "--kind", "style-scorer", "--lang", "rust")
        project.write("scorer/src/lib.rs", SCORER)
        end = project.querl("plugin", "build", "scorer")
        tally.attack("a style scorer is built", end.problem(0))
        config = project.path("querl.toml").read_text()
        style = '[plugins.style_model]\npath = "style"\n[[plugins.rewards]]\npath = "scorer"\nsettings = {{ label = "{}" }}\n'
        for breach in ("none", "panics", "loops", "allocates", "nan", "above", "asks", "rejects"):
            shutil.rmtree(project.path("run"), ignore_errors=True)
            project.write("querl.toml", config + style.format(breach))
            project.querl("run", "querl.toml", "--to", "convert")
            end = project.querl(*EVAL, limit_s=200)
            if breach in ("none", "rejects"):
                tally.attack(f"a style scorer that breaks {breach}", end.problem(0))
                continue
            tally.attack(f"a style scorer that {breach}", end.problem(1, "scorer 0.1.0"))
            kept = sorted(project.path("run/faults").glob("*")) if project.path("run/faults").is_dir() else []
            tally.attack(f"faults/ of a style scorer that {breach}", None if kept else "nothing is kept")
            for path in kept[:1]:
                tally.attack(f"a replay of a style scorer that {breach}", project.querl("plugin", "replay", str(path)).problem(1, "scorer 0.1.0"))


# A line in the function `score` of the plugin, per language. The message must contain the file and the line of the marker.
PYTHON = """from querl_sdk import Episode, Reward, Score, Settings, export


class Length(Reward):
    def __init__(self, settings: Settings) -> None:
        pass

    def range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score(self, episode: Episode) -> Score:
        {line}
        return Score(0.5)


export(reward=Length)
"""
JAVASCRIPT = """import {{ plugin }} from "#querl-sdk";
{head}
export class Length {{
  range() {{
    return [0, 1];
  }}

  score(episode) {{
    {line}
    return {{ total: 0.5 }};
  }}
}}

export default plugin({{ reward: Length }});
"""
IN_PYTHON = {
    "an exception": "raise KeyError(episode.query)",
    "a division by zero": "1 / 0",
    "a missing attribute": "episode.nothing",
    "a file": "open('/etc/passwd').read()",
    "a socket": "__import__('socket').create_connection(('127.0.0.1', 80))",
    "a process": "__import__('subprocess').run(['ls'])",
    "a recursion": "self.score(episode)",
    "an exit": "raise SystemExit(0)",
}
IN_JAVASCRIPT = {
    "an exception": "throw new Error(episode.query);",
    "a missing property": "episode.nothing.here;",
    "an undefined function": "fly();",
    "a recursion": "this.score(episode);",
    "a total that is a text": 'return { total: "high" };',
    "a total that is NaN": "return { total: NaN };",
    "nothing returned": "return;",
    "a promise": "return Promise.resolve({ total: 0.5 });",
}
HEADS = {
    "node:fs": 'import { readFileSync } from "node:fs";',
    "a module that is not there": 'import { x } from "no-such-package";',
    "a syntax error": "const = 3;",
    "a throw": 'throw new Error("at the start");',
}


def new_plugin(project: Project, language: str) -> None:
    shutil.rmtree(project.path("length"), ignore_errors=True)
    end = project.querl("plugin", "new", "length", "--kind", "reward", "--lang", language)
    assert end.code == 0, end


def native_authors(tally) -> None:
    """`plugin dev` names file and line."""
    for language, program, source, file, attacks in (
        ("python", "python3", PYTHON, "plugin.py", IN_PYTHON),
        ("javascript", "node", JAVASCRIPT, "plugin.js", IN_JAVASCRIPT),
    ):
        if not shutil.which(program):
            tally.skip(f"plugins in {language}", f"{program} is not installed")
            continue
        with Project() as project:
            new_plugin(project, language)
            for name, line in attacks.items():
                text = source.format(line=line, head="")
                project.write(f"length/{file}", text)
                number = text[: text.index(line)].count("\n") + 1
                end = project.querl("plugin", "dev", "length", "--episodes", EPISODES, "--once", "--no-component", limit_s=60)
                is_value = "total" in line or "return;" in line or "Promise" in line
                # Run natively, the plugin may open files; the component may not.
                is_allowed = language == "python" and name in ("a file", "a process")
                said = end.out + end.err
                if is_allowed:
                    problem = None if end.code in (0, 1) else said[-300:]
                elif is_value:
                    problem = None if end.code == 1 and "panicked at" not in said else said[-300:]
                else:
                    problem = None if end.code == 1 and f"{file}:{number}" in said else f"{end.code}, no {file}:{number} in {said[-500:]}"
                tally.attack(f"{name} in a reward in {language}", problem)
            if language == "javascript":
                for name, head in HEADS.items():
                    project.write(f"length/{file}", source.format(line="", head=head))
                    end = project.querl("plugin", "dev", "length", "--episodes", EPISODES, "--once", "--no-component", limit_s=60)
                    tally.attack(f"{name} at the head in javascript", None if end.code in (0, 1) and "panicked at" not in end.err else end.err[-300:])


def components(tally) -> None:
    """Components in Python and JavaScript: the fault has a line number (in JavaScript that of the bundle), and no path of the author is included."""
    tools = {"python": PLUGINS / ".venv", "javascript": PLUGINS / "node_modules"}
    for language, source, file, attacks in (
        ("python", PYTHON, "plugin.py", ("an exception", "a file", "a socket", "a process")),
        ("javascript", JAVASCRIPT, "plugin.js", ("an exception", "a missing property", "a total that is a text")),
    ):
        if not tools[language].exists():
            tally.skip(f"components in {language}", "plugins/setup.sh has not run")
            continue
        with Project() as project:
            new_plugin(project, language)
            project.path(f"length/{tools[language].name}").symlink_to(tools[language])
            lines = IN_PYTHON if language == "python" else IN_JAVASCRIPT
            for name in attacks:
                text = source.format(line=lines[name], head="")
                project.write(f"length/{file}", text)
                number = text[: text.index(lines[name])].count("\n") + 1
                built = project.querl("plugin", "build", "length", "--json")
                tally.attack(f"a component in {language} with {name}", built.problem(0))
                if built.code:
                    continue
                component = Path(project.folder, json.loads(built.out)["component"])
                leaks = str(project.folder).encode() in component.read_bytes()
                tally.attack(f"folders in a component in {language}", "it has the author's folder" if leaks else None)
                end = project.querl("plugin", "replay", EPISODES, "--plugin", str(component))
                said = end.out + end.err
                if language == "python":
                    line = f'plugin.py", line {number}'
                elif "total" in name:
                    line = "length 0.1.0"  # a value has no stack trace
                else:
                    bundle = project.path("length/dist/length.js").read_text()
                    # esbuild renames a parameter whose name is taken, for example to episode2.
                    found = re.search(re.escape(lines[name]).replace("episode", r"episode\d*"), bundle)
                    line = f"length.js:{bundle[: found.start()].count(chr(10)) + 1}:"
                named = line in said or f"{file}:{number}" in said
                problem = None if end.code == 1 and named and "panicked at" not in said else f"{end.code}: {said[-600:]}"
                tally.attack(f"{name} in a component in {language}", problem)
            if language == "javascript":
                for name, head in HEADS.items():
                    project.write(f"length/{file}", source.format(line="", head=head))
                    end = project.querl("plugin", "build", "length")
                    fine = end.code == 0 or end.problem(2) is None or end.problem(1) is None
                    tally.attack(f"a component with {name} at its head", None if fine else end.err[-400:])


# Packages with which a plugin in Python cannot be built without a workaround, and the text of the error.
PACKAGES = {
    "numpy": ["the package `numpy` has code that is compiled for this machine", "write the plugin in Rust"],
    "jieba": ["`jieba` (", "at most 67 MB can be loaded", "use the host function `words`"],
}
# The workaround of sdk/python/README.md.
JIEBA_NEXT_TO_PLUGIN = """import jieba

jieba.dt.tmp_dir = "/"
jieba.initialize()
"""


def packages(tally) -> None:
    """A third-party package works in a component, or the build error says what to do. Needs the Python package index."""
    if not (PLUGINS / ".venv").exists():
        tally.skip("packages in components in Python", "plugins/setup.sh has not run")
        return
    with Project() as project:

        def run(*command: str | Path) -> str | None:
            end = subprocess.run(command, cwd=project.folder, capture_output=True, text=True)
            return end.stderr[-300:] if end.returncode else None

        def environment(*names: str) -> str | None:
            """A plugin whose environment contains componentize-py and these packages only."""
            new_plugin(project, "python")
            folder = project.path("length/.venv")
            pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check"]
            return (
                run("python3", "-m", "venv", folder)
                or run(*pip, "install", "--quiet", "-r", PLUGINS / "requirements.txt", *names)
                or run(*pip, "uninstall", "--quiet", "--yes", "setuptools")
            )

        for name, said in PACKAGES.items():
            if missing := environment(name):
                tally.skip(f"the package {name} in a component", missing)
                continue
            source = PYTHON.format(line="pass").replace("from querl_sdk", f"import {name}\nfrom querl_sdk", 1)
            project.write("length/plugin.py", source)
            tally.attack(f"a component with {name}", project.querl("plugin", "build", "length").problem(2, *said))
            if name == "numpy":
                continue
            # The words of a query from the host function equal those from the package next to plugin.py.
            found = next(project.path("length/.venv/lib").glob("python3.*/site-packages/jieba"))
            shutil.copytree(found, project.path("jieba"), ignore=shutil.ignore_patterns("posseg", "analyse", "lac_small", "__pycache__"))
            if missing := environment():
                tally.skip("jieba next to plugin.py", missing)
                continue
            shutil.move(project.path("jieba"), project.path("length/jieba"))
            shutil.rmtree(project.path("length/jieba/finalseg"))
            project.write("length/jieba/finalseg/__init__.py", "def cut(text):\n    return list(text)\n")
            line = 'raise KeyError("/".join(jieba.cut("胶原蛋白怎么吃")))'
            project.write("length/plugin.py", JIEBA_NEXT_TO_PLUGIN + PYTHON.format(line=line))
            built = project.querl("plugin", "build", "length", "--json")
            tally.attack("a component with jieba next to plugin.py", built.problem(0))
            if built.code == 0:
                component = str(Path(project.folder, json.loads(built.out)["component"]))
                end = project.querl("plugin", "replay", EPISODES, "--plugin", component)
                tally.attack("words of jieba in a component", end.problem(1, "胶原蛋白/怎么/吃"))


def keys_and_locks(tally) -> None:
    bundle = "reward-competition-0.2.0.querl"
    with Project() as project:
        tally.attack("a key", project.querl("plugin", "sign", "--new-key", "key.pem").problem(0))
        tally.attack("a bundle", project.querl("plugin", "pack", REWARD, "--sign", "key.pem").problem(0))
        tally.attack("its signature", project.querl("plugin", "verify", bundle, "--key", "key.pem.pub").problem(0))
        if shutil.which("openssl"):
            for args in (["pkey", "-in", "key.pem", "-noout"], ["pkey", "-pubin", "-in", "key.pem.pub", "-noout"]):
                end = subprocess.run(["openssl", *args], cwd=project.folder, capture_output=True, text=True)
                tally.attack(f"openssl {args[-2]}", end.stderr or None)
        else:
            tally.skip("keys in openssl", "it is not installed")
        content = project.path(bundle).read_bytes()
        places = [len(content) * part // 40 for part in range(40)]
        for place in places:
            changed = bytearray(content)
            changed[place] ^= 1
            project.write(bundle, bytes(changed))
            end = project.querl("plugin", "verify", bundle, "--key", "key.pem.pub")
            tally.attack(f"a flipped bit at byte {place}", end.problem(2) and end.problem(1))
        for n_bytes in (0, 10, len(content) // 2, len(content) - 1):
            project.write(bundle, content[:n_bytes])
            tally.attack(f"a bundle of {n_bytes} bytes", project.querl("plugin", "verify", bundle).problem(1, "truncated"))
        project.write(bundle, content)
        project.edit(REWARD, bundle)
        tally.attack("--locked without a lock", project.querl("run", "querl.toml", "--to", "convert", "--locked").problem(2, "querl.lock"))
        tally.attack("a first run", project.querl("run", "querl.toml", "--to", "convert").problem(0))
        tally.attack("--locked", project.querl("run", "querl.toml", "--to", "convert", "--locked").problem(0))
        trust = "plugins.trusted_keys=['ed25519:" + "0" * 64 + "']"
        tally.attack("a signer who is not trusted", project.querl("run", "querl.toml", "--out", "third", "--set", trust).problem(2))


def rotated_keys(tally) -> None:
    """Rotates a key as docs/plugins.md describes, and revokes a lost one."""
    bundle = "reward-competition-0.2.0.querl"
    with Project() as project:
        keys = [project.querl("plugin", "sign", "--new-key", name).out.strip() for name in ("old.pem", "new.pem")]
        tally.attack("two keys", None if all(key.startswith("ed25519:") for key in keys) else str(keys))
        project.querl("plugin", "pack", REWARD, "--sign", "old.pem")
        shutil.copy(project.path(bundle), project.path("old-only.querl"))
        tally.attack("a second signature", project.querl("plugin", "sign", bundle, "--key", "new.pem").problem(0))
        config = project.path("querl.toml").read_text()
        # The other plugins are bundles with both signatures, so that only the reward's signature matters.
        for kind in ("filter-quality", "tenant-fivedoctors"):
            source = str(PLUGINS / kind)
            project.querl("plugin", "pack", source, "--sign", "old.pem")
            packed = next(project.folder.glob(f"{kind}-*.querl")).name
            project.querl("plugin", "sign", packed, "--key", "new.pem")
            config = config.replace(source, packed)
        for name, file, trusted, code in (
            ("both keys are trusted", bundle, keys, 0),
            ("the new key alone, both signatures", bundle, keys[1:], 0),
            ("the new key alone, the old signature", "old-only.querl", keys[1:], 2),
            ("the old key alone, the old signature", "old-only.querl", keys[:1], 0),
        ):
            project.write("querl.toml", config.replace(REWARD, file))
            end = project.querl("config", "check", "querl.toml", "--set", f"plugins.trusted_keys={json.dumps(trusted)}")
            tally.attack(f"rotation: {name}", end.problem(code, *([file, keys[1]] if code else [])))


GROUPS = {
    "folders with the names of files": [folders_named_as_files],
    "faults of plugins in a run": [faults_of_rewards, faults_of_style_scorers],
    "plugins in Python and JavaScript": [native_authors, components, packages],
    "keys, bundles, locks": [keys_and_locks, rotated_keys],
}
