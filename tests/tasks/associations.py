#!/usr/bin/env python3
"""What a linear model learns from the training rows of a run: words of passage titles from words of query and history.

    tests/tasks/associations.py RUN_DIR [--language english] [--terms 5] [--probability 0.2]

For each word that the gold titles of 3 or more training rows have, a logistic regression (binary words, L2, C = 10) learns from query and
history whether the title of the gold passage has it. On the validation split the words above --probability, at most --terms, are appended to
query and history. Printed: top-1 and MRR (0 below rank 5) by a BM25 of this script (title twice, stemmed), which is not querl's index, so that
only the rows of this table can be compared with each other. Test rows are not read. For languages with spaces between words; the knowledge base
is the one that config.resolved.toml of the run names. Needs numpy, scikit-learn and snowballstemmer.
"""

import argparse
import collections
import json
import math
import re
import tomllib
from pathlib import Path

import numpy as np
import snowballstemmer
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

TOP_K = 5


class Bm25:
    def __init__(self, documents):
        lengths = [len(words) for words in documents]
        mean = sum(lengths) / len(lengths)
        frequency = collections.Counter(word for words in documents for word in set(words))
        n = len(documents)
        self.n, self.weights = n, {}
        for index, words in enumerate(documents):
            for word, count in collections.Counter(words).items():
                idf = math.log(1 + (n - frequency[word] + 0.5) / (frequency[word] + 0.5))
                row = self.weights.setdefault(word, np.zeros(n))
                row[index] = idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * lengths[index] / mean))

    def rank(self, words, gold):
        """The rank of the best gold passage, of equal scores in the order of the file; None if no gold passage has any of the words."""
        scores = sum((self.weights[word] for word in words if word in self.weights), np.zeros(self.n))
        ranks = [int((scores > scores[at]).sum() + (scores[:at] == scores[at]).sum()) + 1 for at in gold if scores[at] > 0]
        return min(ranks, default=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--language", default="english")
    parser.add_argument("--terms", type=int, default=5)
    parser.add_argument("--probability", type=float, default=0.2)
    args = parser.parse_args()
    stemmer = snowballstemmer.stemmer(args.language)

    def words(text):
        return [stemmer.stemWord(word) for word in re.findall(r"\w+", text.lower())]

    config = tomllib.loads((args.run / "config.resolved.toml").read_text(encoding="utf-8"))
    lines = Path(config["retrieval"]["knowledge_base"]).read_text(encoding="utf-8").splitlines()
    passages = [json.loads(line) for line in lines]
    position = {str(passage["id"]): index for index, passage in enumerate(passages)}
    titles = [words(passage["title"]) for passage in passages]
    index = Bm25([2 * title + words(passage["text"]) for title, passage in zip(titles, passages)])

    def rows(split):
        found = []
        for line in (args.run / f"data/{split}.jsonl").read_text(encoding="utf-8").splitlines():
            of = json.loads(line)["metadata"]
            gold = [position[name] for name in of["gold_ids"] if name in position]
            if gold:
                found.append((of["id"], words(of["original_query"]), words(of["history_summary"]), gold))
        return found

    rewrites = {}
    for line in (args.run / "data/rewrites.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        rewrites[record["id"]] = words(record["rewrite"].get("Ok", {}).get("text", ""))
    train, val = rows("train"), rows("val")
    vectorizer = CountVectorizer(analyzer=lambda row: row[1] + row[2] + ["history:" + word for word in row[2]], binary=True)
    features, of_val = vectorizer.fit_transform(train), vectorizer.transform(val)
    counts = collections.Counter(word for row in train for word in {word for gold in row[3] for word in titles[gold]})
    terms = [word for word, count in counts.items() if 3 <= count < len(train)]
    probabilities = np.zeros((len(val), len(terms)))
    for column, term in enumerate(terms):
        has_it = np.array([any(term in titles[gold] for gold in row[3]) for row in train])
        fitted = LogisticRegression(C=10, max_iter=200).fit(features, has_it)
        probabilities[:, column] = fitted.predict_proba(of_val)[:, 1]

    def predicted(row):
        best = np.argsort(-probabilities[row], kind="stable")[: args.terms]
        return [terms[column] for column in best if probabilities[row][column] > args.probability]

    print(f"{args.run}: {len(train)} training rows, {len(val)} validation rows, {len(terms)} title words")
    systems = {
        "raw": lambda _, row: row[1],
        "with history": lambda _, row: row[1] + row[2],
        "with history and predicted title words": lambda number, row: row[1] + row[2] + predicted(number),
        "teacher": lambda _, row: rewrites.get(row[0], []),
    }
    for name, text in systems.items():
        ranks = [index.rank(text(number, row), row[3]) for number, row in enumerate(val)]
        top1 = np.mean([rank == 1 for rank in ranks])
        mrr = np.mean([1 / rank if rank and rank <= TOP_K else 0 for rank in ranks])
        print(f"{name:40} top-1 {100 * top1:5.1f} %  MRR {mrr:.3f}")


if __name__ == "__main__":
    main()
