#!/usr/bin/env python3
"""Makes the data sets of this example from the source texts, and checks them.

In:  source/NN-*.txt (labelled, one scene a file), source/seed26.txt, source/unlabelled.txt.
Out: dialogues.json and seed26.json (input, label, label_english, metadata), unlabelled.json (input, metadata), answers.jsonl (original_query,
     rewritten_query: question and answer of the labelled and the unlabelled ones).

A source file has a line `场景：...`, then a line `[label]` before the dialogues of a label, and a dialogue a line:

    [@group ][~label ]question ｜ answer

`@group` names dialogues that belong together: two texts about one subject, in whatever style. A dialogue without one is a group
of its own. `~label` names the class that an inattentive reader would give; the dialogue is a boundary case.

The same sources give the same bytes. Standard library alone; reads and writes nothing outside this folder.
"""

import json
import random
from collections import Counter
from itertools import combinations
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LABELS = {"售前": "sales_oriented", "售后": "after_sales", "诚实": "honesty", "有帮助": "helpful", "无伤害": "harmless"}
SEED_COUNTS = {"售前": 7, "售后": 4, "诚实": 5, "有帮助": 6, "无伤害": 4}
SEED = 42
# Trigrams that two texts share, over those of both: above this, one is the other with a few words changed.
TOO_SIMILAR = 0.3


def read(path: Path, prefix: str) -> list[dict]:
    """Dialogues of a source file. `prefix` begins the names of its groups."""
    rows, scene, label = [], None, None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        place = f"{path.name}:{number}"
        if line.startswith("场景："):
            scene, label = line.removeprefix("场景："), None
        elif line.startswith("["):
            label = line.strip("[]")
            if label not in LABELS:
                raise SystemExit(f"{place}: label `{label}`; expected one of {', '.join(LABELS)}")
        else:
            rows.append(dialogue(line, place, scene, label, f"{prefix}-{number:03}"))
    return rows


def dialogue(line: str, place: str, scene: str | None, label: str | None, group: str) -> dict:
    metadata = {"source": "written", "scene": scene, "group": group}
    while line[:1] in ("@", "~"):
        mark, line = line.split(" ", 1)
        if mark[0] == "@":
            metadata["group"] = f"{group.rsplit('-', 1)[0]}-{mark[1:]}"
        elif mark[1:] in LABELS and mark[1:] != label:
            metadata["boundary"] = LABELS[mark[1:]]
        else:
            raise SystemExit(f"{place}: boundary `{mark[1:]}` of label `{label}`; expected another label")
    question, separator, answer = line.partition(" ｜ ")
    if not (separator and question.strip() and answer.strip() and scene):
        raise SystemExit(f"{place}: expected a scene above, and `question ｜ answer`")
    row = {"input": f"用户问题：{question.strip()}\n回答：{answer.strip()}"}
    if label:
        row |= {"label": label, "label_english": LABELS[label]}
    return row | {"metadata": metadata}


def trigrams(text: str) -> set[str]:
    return {text[start : start + 3] for start in range(len(text) - 2)}


def check(rows: list[dict]) -> None:
    """Texts are distinct across all files: no evaluation text is in the training data."""
    texts = Counter(row["input"] for row in rows)
    questions = {}
    for text, count in texts.items():
        if count > 1:
            raise SystemExit(f"comes {count} times: {text}")
    grams = [trigrams(row["input"].removeprefix("用户问题：")) for row in rows]
    for (first, left), (second, right) in combinations(enumerate(grams), 2):
        groups = {rows[index]["metadata"]["group"] for index in (first, second)}
        if len(groups) == 2 and len(left & right) > TOO_SIMILAR * len(left | right):
            raise SystemExit(f"too similar, in different groups:\n{rows[first]['input']}\n{rows[second]['input']}")
    for row in rows:
        question = row["input"].split("\n")[0]
        group = questions.setdefault(question, row["metadata"]["group"])
        if group != row["metadata"]["group"]:
            raise SystemExit(f"one question in two groups, `{group}` and `{row['metadata']['group']}`: {question}")


def write(name: str, rows: list[dict]) -> None:
    text = json.dumps(rows, ensure_ascii=False, indent=1)
    (FOLDER / name).write_text(text + "\n", encoding="utf-8")


def write_answers(rows: list[dict]) -> None:
    """Questions with the answers that were written to them, of whatever style: what answers.toml begins with. A question comes once."""
    lines, questions = [], set()
    for row in rows:
        question, answer = row["input"].removeprefix("用户问题：").split("\n回答：", 1)
        if question not in questions:
            questions.add(question)
            lines.append(json.dumps({"original_query": question, "rewritten_query": answer}, ensure_ascii=False))
    (FOLDER / "answers.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def show(rows: list[dict]) -> None:
    """The table of README.md."""
    scenes = list(dict.fromkeys(row["metadata"]["scene"] for row in rows))
    print("| scene |", " | ".join(LABELS), "| all | boundary | groups |")
    print("|---|" + "---|" * (len(LABELS) + 3))
    for scene in [*scenes, None]:
        of_scene = [row for row in rows if scene in (None, row["metadata"]["scene"])]
        counts = Counter(row["label"] for row in of_scene)
        boundary = sum("boundary" in row["metadata"] for row in of_scene)
        groups = len({row["metadata"]["group"] for row in of_scene})
        print("|", scene or "all", "|", " | ".join(str(counts[label]) for label in LABELS), f"| {len(of_scene)} | {boundary} | {groups} |")


def main() -> None:
    labelled = []
    for path in sorted((FOLDER / "source").glob("[0-9]*.txt")):
        labelled += read(path, path.stem.split("-", 1)[1])
    seed, unlabelled = read(FOLDER / "source/seed26.txt", "seed26"), read(FOLDER / "source/unlabelled.txt", "unlabelled")
    check(labelled + seed + unlabelled)
    if Counter(row["label"] for row in seed) != SEED_COUNTS:
        raise SystemExit(f"seed26.txt: expected {SEED_COUNTS} by label")
    if len(labelled) < 400 or any("label" in row for row in unlabelled):
        raise SystemExit("expected at least 400 labelled dialogues, and none with a label in unlabelled.txt")
    for rows in (labelled, seed, unlabelled):
        random.Random(SEED).shuffle(rows)
    for name, rows in (("dialogues", labelled), ("seed26", seed), ("unlabelled", unlabelled)):
        write(f"{name}.json", rows)
    write_answers(labelled + unlabelled)
    show(sorted(labelled, key=lambda row: row["metadata"]["group"]))
    print(f"\n{len(seed)} in the seed's shape, {len(unlabelled)} without labels")
    lengths = sorted(len(row["input"]) for row in labelled)
    print(f"characters of a dialogue: {lengths[0]} to {lengths[-1]}, median {lengths[len(lengths) // 2]}")


if __name__ == "__main__":
    main()
