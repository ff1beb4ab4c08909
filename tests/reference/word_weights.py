"""Weights of the words of queries, by torch: Lucene's BM25, softmax cross-entropy over passages, `torch.optim.Adam`."""

import json
import math
import random

from common import GOLDEN
import torch

N_PASSAGES, N_EXAMPLES, N_ROWS = 14, 12, 30
SYLLABLES = ["bak", "dol", "fim", "gur", "hak", "jol", "kem", "lup", "mor", "nad", "pof", "rak", "tum", "vok", "zar"]


def table(generator):
    """Passages, whose last two are no examples, and rows of ten groups."""
    words = SYLLABLES + [one + two for one, two in zip(SYLLABLES, SYLLABLES[3:])]
    text = lambda n: " ".join(generator.choice(words) for _ in range(n))
    passages = [{"id": f"p{n}", "title": text(2), "text": text(generator.randint(5, 14))} for n in range(N_PASSAGES)]
    rows = []
    for n in range(N_ROWS):
        gold = generator.sample(range(N_PASSAGES), generator.choice([1, 1, 2]))
        of_gold = " ".join(generator.choice(passages[at]["text"].split()) for at in gold)
        query = f"{text(3)} {of_gold} {generator.choice(['yag', 'xot', 'wen'])}"
        history = text(4) if n % 3 else ""
        rows.append({"query": query, "history": history, "group": f"g{n % 10}", "gold_ids": [f"p{at}" for at in gold]})
    return passages, rows


def bm25(passages):
    """The part of each passage's score of each word, and the IDF of a number of passages; statistics of the examples."""
    counts = [(f"{passage['title']}\n{passage['text']}").split() for passage in passages]
    mean = sum(map(len, counts[:N_EXAMPLES])) / N_EXAMPLES
    idf = lambda n: math.log(1 + (N_EXAMPLES - n + 0.5) / (n + 0.5))
    n_with = lambda word: sum(word in words for words in counts[:N_EXAMPLES])

    def parts(word):
        scale = idf(n_with(word))
        of = lambda words: words.count(word) * 2.2 / (words.count(word) + 1.2 * (0.25 + 0.75 * len(words) / mean))
        return [scale * of(words) for words in counts]

    return parts, lambda word: idf(n_with(word))


def fit(passages, rows):
    parts, idf = bm25(passages)
    of_titles = {word for passage in passages[:N_EXAMPLES] for word in passage["title"].split()}
    of_texts = {word for p in passages[:N_EXAMPLES] for word in (p["title"] + " " + p["text"]).split()}
    of_rows = [[(w, 0) for w in sorted(set(r["query"].split()))] + [(w, 1) for w in sorted(set(r["history"].split()))] for r in rows]
    groups = {}
    for row, words in zip(rows, of_rows):
        for word, _ in words:
            groups.setdefault(word, set()).add(row["group"])
    n_groups = lambda word: len(groups.get(word, ()))
    own = {word: at for at, word in enumerate(sorted(word for word in groups if len(groups[word]) >= 2))}
    of_word = lambda word: [idf(word) / 3, float(word in of_titles), 0.0, math.log(1 + n_groups(word)), len(word) / 5]

    def features(word, is_history):
        values = of_word(word)
        values[2] = float(is_history)
        return values

    double = {"dtype": torch.float64}
    coefficients = torch.zeros(5, requires_grad=True, **double)
    factor = torch.zeros(1, requires_grad=True, **double)
    words_own = torch.zeros(len(own) + 1, requires_grad=True, **double)
    optimizer = torch.optim.Adam([coefficients, factor, words_own], lr=0.05)
    matrices = [torch.tensor([parts(word) for word, _ in words], **double) for words in of_rows]
    inputs = [torch.tensor([features(*word) for word in words], **double) for words in of_rows]
    at_own = [torch.tensor([own.get(word, len(own)) for word, _ in words]) for words in of_rows]
    of_id = {passage["id"]: at for at, passage in enumerate(passages)}

    def log_weights(row):
        return inputs[row] @ coefficients + torch.cat([words_own[:-1], torch.zeros(1, **double)])[at_own[row]]

    for _ in range(200):
        optimizer.zero_grad()
        loss = 3 * (words_own[:-1] ** 2).sum() + 0.5 * (coefficients**2).sum()
        for row, matrix in enumerate(matrices):
            scores = (factor + log_weights(row)).exp() @ matrix
            gold = [of_id[name] for name in rows[row]["gold_ids"]]
            candidates = sorted({*range(N_EXAMPLES), *gold})
            loss = loss - torch.log_softmax(scores[candidates], 0)[[candidates.index(at) for at in gold]].mean()
        (loss / len(rows)).backward()
        optimizer.step()
    with torch.no_grad():
        of_all = [weight.exp() for row, words in enumerate(of_rows) for (word, _), weight in zip(words, log_weights(row)) if any(parts(word)[:N_EXAMPLES])]
        log_mean = torch.stack(of_all).mean().log().item()
        values = coefficients.tolist()

        def stored(word):
            without_length = sum(x * y for x, y in zip(of_word(word)[:4], values[:4]))
            return without_length + (words_own[own[word]].item() if word in own else 0.0) - log_mean

        unknown = math.log(1 + (N_EXAMPLES + 0.5) / 0.5) / 3
        known = sorted(of_texts | set(own))
        return {
            "of_history": values[2],
            "of_length": values[4],
            "of_others": values[0] * unknown - log_mean,
            "words": {word: stored(word) for word in known},
        }


def main():
    passages, rows = table(random.Random(3))
    golden = {"n_examples": N_EXAMPLES, "passages": passages, "rows": rows, "weights": fit(passages, rows)}
    (GOLDEN / "word_weights.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
