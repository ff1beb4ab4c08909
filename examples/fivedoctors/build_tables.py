#!/usr/bin/env python3
"""Makes the query table and the recorded teacher from the source texts.

In:  source/queries-*.jsonl, one query a line: 问题, 用户画像, 历史摘要, 相关文档, teacher.
Out: 测试集.xlsx (问题, 用户画像, 历史摘要, 相关文档) and teacher_rewrites.jsonl (original_query, user_profile,
     history_summary, rewritten_query).

Rows are shuffled with a fixed seed, so that the paraphrases of one need do not stand together. The same sources give the same
bytes: time stamps inside the workbook are fixed. Needs openpyxl 3.1 (`pip install openpyxl==3.1.5`); reads and writes nothing
outside this folder.
"""

import json
import random
import re
import zipfile
from io import BytesIO
from pathlib import Path

from openpyxl import Workbook

FOLDER = Path(__file__).resolve().parent
COLUMNS = ["问题", "用户画像", "历史摘要", "相关文档"]
SEED = 42
FIXED_TIME = "2026-01-01T00:00:00Z"


def read_source() -> list[dict]:
    rows = []
    for path in sorted((FOLDER / "source").glob("queries-*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            row = json.loads(line)
            if sorted(row) != sorted([*COLUMNS, "teacher"]) or not row["问题"].strip():
                raise SystemExit(f"{path.name}:{number}: expected the keys {COLUMNS} and teacher, and a query that is not empty")
            rows.append(row)
    return rows


def check(rows: list[dict]) -> None:
    """One query in one context has one answer; every answer is in the knowledge base."""
    known = {json.loads(line)["id"] for line in (FOLDER / "knowledge_base.jsonl").read_text(encoding="utf-8").splitlines()}
    seen = {}
    for row in rows:
        key = (row["问题"], row["用户画像"], row["历史摘要"])
        if key in seen:
            raise SystemExit(f"{key}: asked twice, for {seen[key]} and {row['相关文档']}")
        seen[key] = row["相关文档"]
        if row["相关文档"] not in known:
            raise SystemExit(f"{row['相关文档']}: named by a query, not in knowledge_base.jsonl")


def write_workbook(rows: list[dict], path: Path) -> None:
    workbook = Workbook()
    sheet = workbook.active
    sheet.title = "测试集"
    sheet.append(COLUMNS)
    for row in rows:
        sheet.append([row[column] for column in COLUMNS])
    for letter, width in zip("ABCD", (44, 32, 48, 22)):
        sheet.column_dimensions[letter].width = width
    sheet.freeze_panes = "A2"
    raw = BytesIO()
    workbook.save(raw)
    path.write_bytes(with_fixed_times(raw))


def with_fixed_times(workbook: BytesIO) -> bytes:
    """The same workbook with fixed time stamps in its archive and in its properties."""
    out = BytesIO()
    with zipfile.ZipFile(workbook) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "docProps/core.xml":
                data = re.sub(rb"\d{4}-\d\d-\d\dT[\d:.]+Z", FIXED_TIME.encode(), data)
            target.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def write_teacher(rows: list[dict], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            record = {
                "original_query": row["问题"],
                "user_profile": row["用户画像"],
                "history_summary": row["历史摘要"],
                "rewritten_query": row["teacher"],
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main() -> None:
    rows = read_source()
    check(rows)
    random.Random(SEED).shuffle(rows)
    write_workbook(rows, FOLDER / "测试集.xlsx")
    write_teacher(rows, FOLDER / "teacher_rewrites.jsonl")
    print(f"{len(rows)} queries, {len({row['相关文档'] for row in rows})} groups")


if __name__ == "__main__":
    main()
