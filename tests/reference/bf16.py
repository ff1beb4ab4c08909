"""Errors of bfloat16 in logits, gradients and gradient norms: PEFT and transformers in bf16 compared with f32, from the same weights, on the
batches of querl's GPU tests. Writes nothing; the limits of those tests are set from its output.

    bf16.py [--device cuda]     # the device of 1 and 2 (default: cpu)

1. host/querl-gpu/tests/decoder.rs, logits: largest difference divided by the largest logit.
2. host/querl-gpu/tests/decoder.rs, gradients of every adapter tensor: L2 norm of the difference divided by the L2 norm in f32.
3. host/querl-train/src/sft/tests/gpu.rs: the gradient norm over nine steps, with rows in several orders.
"""

import argparse
import warnings

from common import GOLDEN, generator
from sft import IGNORED, collate, rows
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, get_scheduler

warnings.filterwarnings("ignore", category=UserWarning, module="peft")

transformers.utils.logging.disable_progress_bar()
DEVICE = "cpu"

# Order of the 24 training rows in two epochs with seed 5 (`cargo run --release -p querl-train --example bench -- order`), and the number
# of other orders that are tried.
QUERLS_ORDER = [
    14, 23, 11, 18, 19, 10, 4, 5, 3, 1, 9, 13, 0, 8, 17, 21, 20, 16, 2, 6, 12, 7, 22, 15,
    15, 19, 18, 8, 7, 5, 2, 14, 9, 1, 17, 10, 23, 16, 13, 4, 6, 21, 0, 3, 11, 12, 20, 22,
]  # fmt: skip
N_ORDERS = 40

SYSTEM = [5, 9, 2, 7]

# As `sequences` in decoder.rs: tokens, and the start of the response.
SEQUENCES = [
    (SYSTEM + [11, 12, 13, 21, 22, 23], 7),
    (SYSTEM + [11, 12, 13, 21, 24], 7),
    (SYSTEM + [11, 12, 14, 15, 31, 32, 33, 34], 8),
    (SYSTEM + [11, 12, 13, 21, 22], 7),
    ([40, 41, 42, 43, 44], 2),
    (SYSTEM + [11, 12, 13, 21, 24], 7),
    ([(i * 29 + 3) % 64 for i in range(60)], 20),
]

# Variants of rounding: two implementations of attention, and with or without the operations that autocast keeps in f32.
MANNERS = [("eager", "all"), ("sdpa", "all"), ("eager", "autocast"), ("sdpa", "autocast")]


def base(name, attention="eager"):
    """The golden's weights rounded as a GPU stores them, in f32."""
    model = AutoModelForCausalLM.from_pretrained(
        GOLDEN / "decoders" / name, dtype=torch.float32, attn_implementation=attention
    )
    return model.to(torch.bfloat16).to(torch.float32)


def adapted(name, attention, use_dora):
    """The model with the values of A, B and magnitudes that `part_with` in decoder.rs sets."""
    settings = LoraConfig(r=3, lora_alpha=6, use_dora=use_dora, target_modules="all-linear", lora_dropout=0.0)
    model = get_peft_model(base(name, attention), settings).to(DEVICE)
    trained = {key.replace(".default", ""): value for key, value in model.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for index, key in enumerate(sorted(trained)):
            value = trained[key]
            angles = torch.tensor([(i * 7 + index * 31) for i in range(value.numel())], dtype=torch.float32)
            change = (torch.sin(angles * 12.9898) * 0.2).view_as(value).to(value.device)
            value.copy_(value * (1 + change) if "magnitude" in key else change)
    return model, trained


def gradients(name, use_dora, attention, rounding):
    """Gradients of a weighted sum of all responses' log-probabilities and entropies at temperature 0.8."""
    model, trained = adapted(name, attention, use_dora)
    if rounding == "all":
        model = model.to(torch.bfloat16)
    found = []
    with torch.autocast(DEVICE, torch.bfloat16, enabled=rounding == "autocast"):
        for tokens, answer in SEQUENCES:
            ids = torch.tensor([tokens], device=DEVICE)
            logits = model(ids).logits[0, answer - 1 : -1].float() / 0.8
            logprobs = torch.log_softmax(logits, -1)
            of_targets = logprobs.gather(1, ids[0, answer:, None])[:, 0]
            found.append(torch.stack([of_targets, -(logprobs.exp() * logprobs).sum(-1)], 1))
    found = torch.cat(found).flatten()
    weights = torch.tensor([0.3 + (i % 5) * 0.1 for i in range(found.numel())], device=DEVICE)
    (found * weights).sum().backward()
    return {key: value.grad.float() for key, value in trained.items()}


NAMES = ("qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied", "qwen3-bias")


@torch.no_grad()
def worst_logits():
    ids = torch.tensor([[(i * 13 + 5) % 64 for i in range(60)]], device=DEVICE)
    for name in NAMES:
        exact = base(name).to(DEVICE)(ids).logits
        for attention, rounding in MANNERS:
            model = base(name, attention).to(DEVICE)
            model = model.to(torch.bfloat16) if rounding == "all" else model
            with torch.autocast(DEVICE, torch.bfloat16, enabled=rounding == "autocast"):
                off = (model(ids).logits.float() - exact).abs().max() / exact.abs().max()
            print(f"logits of {name}, {attention}, {rounding}: {off.item():.4f}")


def worst_gradients():
    for use_dora in (False, True):
        for name in NAMES:
            exact = gradients(name, use_dora, "eager", "none")
            for attention, rounding in MANNERS:
                rounded = gradients(name, use_dora, attention, rounding)
                off = {key: ((rounded[key] - exact[key]).norm() / exact[key].norm()).item() for key in exact}
                key = max(off, key=off.get)
                dora = "DoRA" if use_dora else "LoRA"
                print(f"{dora} on {name}, {attention}, {rounding}: {off[key]:.3f} of {key.split('model.')[-1]}")


def norms(make, order, is_rounded):
    """Gradient norms of nine steps of four rows, as in `all_weights_and_magnitudes_are_trained_on_a_gpu_as_on_the_cpu`."""
    model = make()
    trained = [value for value in model.parameters() if value.requires_grad]
    matrices, vectors = ([value for value in trained if (value.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=9)
    found = []
    for step in range(9):
        batch = collate([order[(4 * step + i) % len(order)] for i in range(4)])
        n_targets = (batch["labels"] != IGNORED).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_rounded):
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        (loss / n_targets).backward()
        found.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


def with_magnitudes():
    path = GOLDEN / "lora/qwen3-tied-dora-rslora"
    return PeftModel.from_pretrained(base("qwen3-tied"), path, is_trainable=True)


def whole():
    return AutoModelForCausalLM.from_pretrained(GOLDEN / "decoders/qwen3-tied", dtype=torch.float32)


def furthest(make, order):
    """The largest relative difference of a step's norm, and the norms in f32."""
    exact, rounded = (norms(make, order, is_rounded) for is_rounded in (False, True))
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(exact, rounded)), exact


def worst_norms():
    made = rows()[:24]
    for what, make in (("all weights", whole), ("magnitudes", with_magnitudes)):
        off, exact = furthest(make, [made[i] for i in QUERLS_ORDER])
        print(f"norms of {what}, querl's order: {off:.3f}; in f32", [round(norm, 2) for norm in exact])
        orders = [torch.randperm(24, generator=generator(seed)).tolist() for seed in range(N_ORDERS)]
        worst = sorted(furthest(make, [made[i] for i in order])[0] for order in orders)
        print(f"norms of {what}, {N_ORDERS} other orders: the largest", [round(off, 3) for off in worst[-6:]])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=DEVICE)
    DEVICE = parser.parse_args().device
    worst_logits()
    worst_gradients()
    worst_norms()
