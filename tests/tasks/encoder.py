#!/usr/bin/env python3
"""Makes a small embedding model of a knowledge base: a BertModel in the folder format of `retrieval.embedding.path`.

    tests/tasks/encoder.py KNOWLEDGE_BASE OUT [--measure RUN_DIR]

Contrastive training from random weights (InfoNCE with in-batch negatives). The pairs are made of the passages alone: a title, a sentence or
spans of title and text, with some tokens dropped, and the passage that contains it. Queries and rewrites are not read. Pooling is the mean of
all tokens. `--measure` prints top-1 and MRR of the vectors alone on the training split of a finished run.
Needs torch and transformers, such as the environment of tests/reference/setup.sh; no network. Takes three minutes on one core.
"""

import argparse
import json
import random
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy, normalize
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

VOCAB_SIZE, LAYERS, HIDDEN, HEADS, POSITIONS = 3000, 2, 128, 4, 256
STEPS, BATCH, LEARNING_RATE, TEMPERATURE = 300, 64, 2e-3, 0.05
MAX_DROP = 0.4  # share of dropped tokens of a query, uniform from 0
PAD, UNK, CLS, SEP = range(4)


def full_text(passage):
    """Joins title and text as querl does for the index."""
    return f"{passage['title']}\n{passage['text']}"


def make_tokenizer(texts):
    """A WordPiece tokenizer as in bge models: lower case, each Chinese character separate."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, show_progress=False))
    pieces = special + sorted(set(tokenizer.get_vocab()) - set(special))  # the trainer's order, and a few rare pieces, differ between runs
    tokenizer.model = models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)])
    return tokenizer


def span(ids, low, high):
    length = random.randint(low, high)
    start = random.randint(0, max(0, len(ids) - length))
    return ids[start : start + length]


def drop(ids, most):
    """Deletes half of the dropped tokens and replaces half by [UNK], to imitate characters and words of users that no passage has."""
    share = random.uniform(0, most)
    kept = [UNK if random.random() < share / 2 else token for token in ids if random.random() > share / 2]
    return kept or ids


def pair(title, sentences):
    """Token ids of a query and of its passage; in half of the cases the query's sentence is removed from the passage."""
    chosen = random.randrange(len(sentences))
    sentence, kind = sentences[chosen], random.random()
    if kind < 0.2:
        query = title
    elif kind < 0.4:
        query = sentence
    elif kind < 0.6:
        query = span(sum(sentences, []), 3, 16)
    else:
        query = span(title, 1, 6) + span(sentence, 2, 10)
    rest = sentences[:chosen] + sentences[chosen + 1 :] if len(sentences) > 1 and random.random() < 0.5 else sentences
    passage = sum([title, *rest], [])
    if random.random() < 0.7:  # takes half the time of whole passages
        passage = span(passage, 24, 48)
    return drop(query, MAX_DROP), drop(passage, MAX_DROP / 4)


def encode(model, texts):
    """Vectors of lists of token ids, (B, H)."""
    texts = [[CLS, *ids[: POSITIONS - 2], SEP] for ids in texts]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [PAD] * (longest - len(text)) for text in texts])
    mask = ids != PAD
    states = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state  # (B, T, H)
    mask = mask.unsqueeze(-1)
    return normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def train(model, passages):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    model.train()
    for step in range(1, STEPS + 1):
        queries, texts = zip(*(pair(*passage) for passage in random.sample(passages, min(BATCH, len(passages)))))
        scores = encode(model, queries) @ encode(model, texts).T / TEMPERATURE  # (B, B)
        labels = torch.arange(len(queries))
        loss = (cross_entropy(scores, labels) + cross_entropy(scores.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.eval()


@torch.no_grad()
def measure(model, tokens, passages, run):
    ids = {json.loads(line)["metadata"]["id"] for line in (run / "data/train.jsonl").open()}
    rows = [row for row in map(json.loads, (run / "data/validated.jsonl").open()) if row["id"] in ids]
    index = encode(model, [tokens(full_text(passage)) for passage in passages])
    systems = {
        "raw": lambda row: row["original_query"],
        "with_history": lambda row: f"{row['original_query']} {row['history_summary']}",
        "teacher": lambda row: row["rewrite"]["Ok"]["text"],
    }
    for system, text in systems.items():
        scores = encode(model, [tokens(text(row)) for row in rows]) @ index.T
        ranked = [[passages[place]["id"] in row["gold_ids"] for place in best] for row, best in zip(rows, scores.topk(5).indices.tolist())]
        top1, mrr = sum(hits[0] for hits in ranked), sum(1 / (1 + hits.index(True)) for hits in ranked if any(hits))
        print(f"{system}: top-1 {100 * top1 / len(rows):.1f} %, MRR {mrr / len(rows):.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("knowledge_base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--measure", type=Path, metavar="RUN_DIR")
    args = parser.parse_args()
    random.seed(42)
    torch.manual_seed(42)
    passages = [json.loads(line) for line in args.knowledge_base.open()]
    tokenizer = make_tokenizer([full_text(passage) for passage in passages])
    tokens = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    sentences = lambda text: [tokens(part) for part in re.split(r"(?<=[。；])|(?<=[.;])\s+", text) if part]
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_attention_heads": HEADS}
    config = BertConfig(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=POSITIONS, pad_token_id=PAD, **sizes)
    model = BertModel(config, add_pooling_layer=False)
    train(model, [(tokens(passage["title"]), sentences(passage["text"])) for passage in passages])
    model.save_pretrained(args.out)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(args.out)
    (args.out / "1_Pooling").mkdir(exist_ok=True)
    (args.out / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    if args.measure:
        measure(model, tokens, passages, args.measure)


if __name__ == "__main__":
    main()
