"""Full fine-tuning in eager PyTorch without a trainer: seconds of each epoch over the rows of a data file.

Written to be fast: logits only at the responses if `responses` says so, a fused optimizer, no padding or batches of similar length.
"""

import random

from common import Stopwatch, WORK, load_model, options, report, rows
import torch
import torch.nn.functional as F

SETTINGS = {
    "padded": {},
    "padded-responses": {"responses": 1},
    "by-length-responses": {"responses": 1, "group": 1},
    "padding-free-responses": {"responses": 1, "padding_free": 1},
}


def padded(batch):
    length = max(len(row["prompt"]) + len(row["response"]) for row in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    labels = torch.full((len(batch), length), -100)
    mask = torch.zeros(len(batch), length, dtype=torch.long)
    for index, row in enumerate(batch):
        tokens = row["prompt"] + row["response"]
        ids[index, : len(tokens)] = torch.tensor(tokens)
        labels[index, len(row["prompt"]) : len(tokens)] = torch.tensor(row["response"])
        mask[index, : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask}, labels


def packed(batch):
    """All rows in one sequence; positions restart at 0 for each row."""
    ids = [row["prompt"] + row["response"] for row in batch]
    labels = [[-100] * len(row["prompt"]) + row["response"] for row in batch]
    positions = torch.cat([torch.arange(len(row)) for row in ids])
    return {"input_ids": torch.tensor([sum(ids, [])]), "position_ids": positions[None]}, torch.tensor([sum(labels, [])])


def loss_of(model, inputs, labels, settings):
    targets = labels[:, 1:]
    if settings.responses:
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1]
        return F.cross_entropy(model.lm_head(hidden[targets != -100]).float(), targets[targets != -100])
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def batches(examples, settings, draw):
    order = list(range(len(examples)))
    draw.shuffle(order)
    if settings.group:
        order.sort(key=lambda index: len(examples[index]["prompt"]) + len(examples[index]["response"]))
    parts = [order[start : start + settings.rows] for start in range(0, len(order), settings.rows)]
    draw.shuffle(parts)
    return [[examples[index] for index in part] for part in parts]


def main():
    settings = options(
        __doc__.splitlines()[0],
        data=str(WORK / "fivedoctors.json"), name="", rows=16, epochs=3, limit=0, learning_rate=1e-4, attn="sdpa",
        responses=0, group=0, padding_free=0,
    )  # fmt: skip
    vars(settings).update(SETTINGS.get(settings.name, {}))
    model = load_model(settings, settings.attn).train()
    examples = rows(settings.data)[: settings.limit or None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    draw, stopwatch, losses = random.Random(0), Stopwatch(), []
    for _ in range(settings.epochs):
        with stopwatch:
            for batch in batches(examples, settings, draw):
                inputs, labels = (packed if settings.padding_free else padded)(batch)
                loss = loss_of(model, inputs, labels, settings)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.item())
    report(stopwatch, losses=losses[:5])


if __name__ == "__main__":
    main()
