"""Loads the splits and tables of a run with datasets, pandas, pyarrow and openpyxl.

Usage: datasets_readback.py RUN/data
"""

import json
import sys
import tempfile
from pathlib import Path

import openpyxl
import pandas
import pyarrow.json
from datasets import load_dataset

SPLITS = ["train", "val", "test"]


def main(data: Path) -> None:
    files = {split: str(data / f"{split}.jsonl") for split in SPLITS}
    with tempfile.TemporaryDirectory() as cache:
        dataset = load_dataset("json", data_files=files, cache_dir=cache)
        features = [dataset[split].features for split in SPLITS]
        assert features[0] == features[1] == features[2], features
        kept = dataset.filter(lambda row: row["metadata"]["dropped"] == "")
        for split in SPLITS:
            last = {row["messages"][-1]["role"] for row in kept[split]}
            assert last == {"assistant"}, (split, last)
            print(f"{split}: {len(dataset[split])} rows, {len(kept[split])} with a rewrite")

    for split, path in files.items():
        lines = [json.loads(line) for line in open(path, encoding="utf-8")]
        assert len(dataset[split]) == len(lines)
        assert len({tuple(line["metadata"]) for line in lines}) == 1, "keys in one order"
        frame = pandas.read_json(path, lines=True)
        assert list(frame.columns) == ["messages", "metadata"] and len(frame) == len(lines)
        table = pyarrow.json.read_json(path)
        assert table.num_rows == len(lines)
    schemas = {str(pyarrow.json.read_json(path).schema) for path in files.values()}
    assert len(schemas) == 1, schemas

    for path in sorted(data.glob("*.xlsx")):
        book = openpyxl.load_workbook(path, read_only=True)
        n_rows = sum(1 for _ in book.worksheets[0].iter_rows()) - 1
        assert n_rows == len(pandas.read_excel(path)), path
        print(f"{path.name}: {n_rows} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
