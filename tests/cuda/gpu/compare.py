#!/usr/bin/env python3
"""The same work as querl-bench in transformers and PEFT on the same device: compare.py --shape 7b --device cuda:0 --out FILE [options].

A Qwen2 with random weights in bf16 is created on the device (no file is read), with f32 LoRA adapters on all linear layers and autocast, as in
transformers' Trainer. Measured are

  sft       forward, backward, clipping and fused AdamW on rows of the lengths that `querl-bench` uses; logits of the responses only; the best of
            several micro-batches; gradient checkpointing only if nothing else fits
  generate  responses by `generate` with its KV cache, `num_return_sequences` per prompt, adapters merged
  ppo       a PPO iteration as in TRL's trainer: responses, log-probabilities of policy and reference (adapter disabled), values by a second
            adapter with a value head on the same base, epochs of updates of both; a constant score

Completed measurements are in FILE even if the script is stopped. Attention is sdpa, or flash attention if `flash_attn` can be imported.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path

import torch

SHAPES = {  # hidden, feed-forward, layers, heads, KV heads, vocabulary, tied head
    "tiny": (128, 256, 2, 2, 1, 2048, True),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
}
MASK = (1 << 64) - 1


class Draw:
    """The random numbers of tests/bench/src/rows.rs (SplitMix64), so that rows are equal token by token."""

    def __init__(self, seed):
        self.state = seed & MASK

    def below(self, n):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = ((self.state ^ (self.state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return (z ^ (z >> 31)) % n

    def token(self, n_vocabulary):
        return 3 + self.below(n_vocabulary - 3)


def examples(n, args, n_vocabulary, seed=0):
    draw = Draw(seed)
    shared = [draw.token(n_vocabulary) for _ in range(args.shared_tokens)]
    rows = []
    for index in range(n):
        draw = Draw(seed ^ ((index + 1) * 0x9E3779B97F4A7C15 & MASK))
        least, most = args.own_tokens
        own = [draw.token(n_vocabulary) for _ in range(least + draw.below(most - least + 1))]
        answer = [draw.token(n_vocabulary) for _ in range(args.answer_tokens - 1)] + [2]
        rows.append((shared + own, answer))
    return rows


class Bench:
    def __init__(self, args):
        self.args = args
        self.device = torch.device(args.device)
        self.on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16
        self.started = time.monotonic()
        self.result = {"shape": args.shape, "torch": torch.__version__, "left_out": []}
        for name in ["transformers", "peft"]:
            self.result[name] = importlib.metadata.version(name)

    def left(self):
        return self.args.seconds - (time.monotonic() - self.started)

    def wait(self):
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def timed(self, work, n):
        """Seconds of `n` calls after one warm-up. If time runs out, fewer calls, or only the warm-up itself."""
        seconds = []
        for index in range(n + 1):
            self.wait()
            begin = time.monotonic()
            work()
            self.wait()
            took = time.monotonic() - begin
            if index or self.left() < 1.5 * took:
                seconds.append(took)
            if seconds and self.left() < 1.5 * took:
                break
        return seconds

    def peak(self):
        return torch.cuda.max_memory_allocated(self.device) if self.on_gpu else None

    def forget_peak(self):
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def autocast(self):
        return torch.autocast(self.device.type, dtype=self.dtype)

    def write(self):
        text = json.dumps(self.result, indent=1)
        new = Path(self.args.out + ".new")
        new.write_text(text)
        new.rename(self.args.out)


def spread(seconds):
    return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds), "n": len(seconds)}


def rate(seconds, amount):
    return {"median": amount / seconds["median"], "least": amount / seconds["most"], "most": amount / seconds["least"], "n": seconds["n"]}


def ceilings(bench):
    n = 8192 if bench.on_gpu else 512
    left, right = (torch.randn(n, n, device=bench.device, dtype=bench.dtype) for _ in range(2))
    out = torch.empty_like(left)
    products = spread(bench.timed(lambda: torch.mm(left, right.t(), out=out), 10))
    source = torch.zeros(1 << (30 if bench.on_gpu else 24), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copies = spread(bench.timed(lambda: target.copy_(source), 10))
    bench.result["ceilings"] = {"matrix": rate(products, 2 * n**3), "copy": rate(copies, 2 * source.numel())}


def make(bench):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen2Config

    hidden, wide, layers, heads, kv_heads, vocabulary, tied = SHAPES[bench.args.shape]
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, tie_word_embeddings=tied, max_position_embeddings=32768, rms_norm_eps=1e-6,
        bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )
    flash = importlib.util.find_spec("flash_attn") is not None and bench.on_gpu
    attention = "flash_attention_2" if flash else "sdpa"
    begin = time.monotonic()
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=bench.dtype, attn_implementation=attention)
    bench.wait()
    made_s = time.monotonic() - begin
    rank = bench.args.lora_rank
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    dtypes = {str(p.dtype) for p in model.parameters() if p.requires_grad}
    bench.result.update(made_s=made_s, attention=attention, parameters=model.get_base_model().num_parameters(), adapter_dtypes=sorted(dtypes))
    return model


def padded(rows, device):
    """Prompts with responses, padded on the left, so that every row ends with its response."""
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for row, (prompt, answer) in enumerate(rows):
        tokens = prompt + answer
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        mask[row, longest - len(tokens) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "position_ids": positions.to(device)}


def answer_logprobs(model, batch, n_answer):
    """Log-probabilities of the last `n_answer` tokens, and their entropies."""
    out = model(**batch, logits_to_keep=n_answer + 1, use_cache=False)
    logits = out.logits[:, :-1].float()
    targets = batch["input_ids"][:, -n_answer:]
    logs = torch.log_softmax(logits, -1)
    return logs.gather(2, targets[:, :, None])[:, :, 0], -(logs.exp() * logs).sum(-1)


def checkpointing(model, on):
    if on:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def optimizer(bench, parameters, learning_rate=1e-4):
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0, fused=bench.on_gpu)


def out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def sft_step(bench, model, optim, batches, n_answers):
    model.train()
    for batch, n_answer in batches:
        with bench.autocast():
            logprobs, _ = answer_logprobs(model, batch, n_answer)
        (-logprobs.sum() / n_answers).backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optim.step()
    optim.zero_grad(set_to_none=True)


def measure_sft(bench, model):
    args = bench.args
    rows = sorted(examples(args.rows, args, model.config.vocab_size), key=lambda row: len(row[0]))
    n_tokens = sum(len(prompt) + len(answer) for prompt, answer in rows)
    n_answers = args.rows * args.answer_tokens
    tried, best = [], None
    for is_checkpointed in [False, True]:
        checkpointing(model, is_checkpointed)
        for size in args.micro_batches:
            if size > args.rows or bench.left() < args.seconds * 0.45 and best:
                continue
            bench.forget_peak()
            optim = optimizer(bench, [p for p in model.parameters() if p.requires_grad])
            try:
                parts = [rows[at : at + size] for at in range(0, len(rows), size)]
                batches = [(padded(part, bench.device), args.answer_tokens) for part in parts]
                seconds = spread(bench.timed(lambda: sft_step(bench, model, optim, batches, n_answers), args.repeats))
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                tried.append({"micro_batch": size, "checkpointing": is_checkpointed, "out_of_memory": True})
                model.zero_grad(set_to_none=True)
                break
            found = {"micro_batch": size, "checkpointing": is_checkpointed, "step_s": seconds,
                     "tokens_per_s": rate(seconds, n_tokens), "peak_bytes": bench.peak()}
            tried.append(found)
            slower = best and found["step_s"]["median"] > best["step_s"]["median"]
            best = best if slower else found
            bench.result["sft"] = {**best, "rows": args.rows, "tokens": n_tokens, "tried": tried}
            bench.write()
            if slower:
                break
        if best:
            break  # gradient checkpointing is only used if nothing fits without it
    checkpointing(model, False)
    if best is None:
        raise RuntimeError("no micro-batch fits the memory")


def generate(model, batch, n_samples, n_new):
    inputs = {name: batch[name] for name in ["input_ids", "attention_mask"]}
    return model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=n_new, min_new_tokens=n_new,
                          num_return_sequences=n_samples, use_cache=True, pad_token_id=0)


def measure_generate(bench, model):
    args = bench.args
    model.eval()
    model.merge_adapter()
    bench.result["generate"] = []
    try:
        for n in args.sequences:
            n_samples = min(args.samples, n)
            prompts = [(prompt, []) for prompt, _ in examples(max(n // n_samples, 1), args, model.config.vocab_size)]
            batch = padded(prompts, bench.device)
            bench.forget_peak()
            with torch.no_grad():
                first = spread(bench.timed(lambda: generate(model, batch, n_samples, 1), args.repeats))
                whole = spread(bench.timed(lambda: generate(model, batch, n_samples, args.max_new_tokens), args.repeats))
            n_answers = len(prompts) * n_samples
            found = {"sequences": n_answers, "seconds": whole, "tokens_per_s": rate(whole, n_answers * args.max_new_tokens),
                     "peak_bytes": bench.peak()}
            decode_s = whole["median"] - first["median"]
            if decode_s > 0:
                found["decode_tokens_per_s"] = n_answers * (args.max_new_tokens - 1) / decode_s
            bench.result["generate"].append(found)
            bench.write()
    finally:
        model.unmerge_adapter()


class Ppo:
    """A PPO iteration as in TRL's PPOTrainer, with a critic as in verl: an adapter and a value head on the same base."""

    def __init__(self, bench, model):
        self.bench, self.model = bench, model
        rank = bench.args.lora_rank
        from peft import LoraConfig

        if "critic" not in model.peft_config:
            model.add_adapter("critic", LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))
        self.head = torch.nn.Linear(model.config.hidden_size, 1, device=bench.device)
        of = lambda name: [p for key, p in model.named_parameters() if f".{name}." in key]
        self.policy, self.critic = of("default"), of("critic")
        self.actor_optim = optimizer(bench, self.policy, 1e-5)
        self.critic_optim = optimizer(bench, [*self.critic, *self.head.parameters()], 1e-4)

    def use(self, name):
        self.model.set_adapter(name)
        for p in self.policy + self.critic:
            p.requires_grad_(False)
        for p in self.policy if name == "default" else self.critic:
            p.requires_grad_(True)

    def values(self, batch, n_answer):
        base = self.model.get_base_model().model
        hidden = base(**batch, use_cache=False).last_hidden_state[:, -n_answer - 1 : -1]
        return self.head(hidden.float())[:, :, 0]

    def iteration(self, prompts, micro):
        bench, args, model = self.bench, self.bench.args, self.model
        n = args.max_new_tokens
        parts_s, begin = {}, time.monotonic()

        def lap(name):
            nonlocal begin
            bench.wait()
            parts_s[name] = time.monotonic() - begin
            begin = time.monotonic()

        model.eval()
        batch = padded([(prompt, []) for prompt in prompts], bench.device)
        self.use("default")
        with torch.no_grad(), bench.autocast():
            answers = generate(model, batch, 1, n)
        lap("gen")
        mask = torch.cat([batch["attention_mask"], torch.ones(len(prompts), n, dtype=torch.long, device=bench.device)], 1)
        ids = answers[:, -mask.shape[1] :]
        whole = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        cut = lambda at: {name: value[at : at + micro] for name, value in whole.items()}
        parts = [cut(at) for at in range(0, len(prompts), micro)]
        with torch.no_grad(), bench.autocast():
            old = torch.cat([answer_logprobs(model, part, n)[0] for part in parts])
            lap("old_log_prob")
            with model.disable_adapter():
                reference = torch.cat([answer_logprobs(model, part, n)[0] for part in parts])
            lap("ref")
            self.use("critic")
            values = torch.cat([self.values(part, n) for part in parts])
            lap("values")
        rewards = -0.05 * (old - reference)
        rewards[:, -1] += 0.5
        advantages, running = torch.zeros_like(rewards), 0.0
        for t in reversed(range(n)):
            after = values[:, t + 1] if t + 1 < n else 0.0
            running = rewards[:, t] + 0.99 * after - values[:, t] + 0.99 * 0.95 * running
            advantages[:, t] = running
        returns = advantages + values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        lap("adv")
        for name, optim, train in [("default", self.actor_optim, self.actor_loss), ("critic", self.critic_optim, self.critic_loss)]:
            self.use(name)
            model.train()
            for _ in range(args.ppo_epochs):
                for index, part in enumerate(parts):
                    at = slice(index * micro, index * micro + len(part["input_ids"]))
                    with bench.autocast():
                        loss = train(part, n, old[at], advantages[at], values[at], returns[at])
                    (loss * len(part["input_ids"]) / len(prompts)).backward()
                trained = self.policy if name == "default" else [*self.critic, *self.head.parameters()]
                torch.nn.utils.clip_grad_norm_(trained, 0.5)
                optim.step()
                optim.zero_grad(set_to_none=True)
            lap("update_actor" if name == "default" else "update_critic")
        return parts_s

    def actor_loss(self, part, n, old, advantages, _values, _returns):
        logprobs, entropy = answer_logprobs(self.model, part, n)
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        return torch.max(-advantages * ratio, -advantages * clipped).mean() - 0.01 * entropy.mean()

    def critic_loss(self, part, n, _old, _advantages, values, returns):
        found = self.values(part, n)
        clipped = values + (found - values).clamp(-0.2, 0.2)
        return 0.25 * torch.max((found - returns) ** 2, (clipped - returns) ** 2).mean()


def measure_ppo(bench, model):
    args = bench.args
    prompts = [prompt for prompt, _ in examples(args.batch, args, model.config.vocab_size)]
    best = bench.result.get("sft", {})
    ppo = Ppo(bench, model)
    is_checkpointed = bool(best.get("checkpointing", False))
    micro = min(best.get("micro_batch", args.micro_batches[0]), args.batch)
    while True:
        checkpointing(model, is_checkpointed)
        bench.forget_peak()
        parts = []
        try:
            seconds = spread(bench.timed(lambda: parts.append(ppo.iteration(prompts, micro)), args.repeats))
            break
        except RuntimeError as error:
            if not out_of_memory(error) or (micro == 1 and is_checkpointed):
                raise
            model.zero_grad(set_to_none=True)
            micro, is_checkpointed = max(micro // 2, 1), is_checkpointed or micro == 1
    counted = parts[-seconds["n"] :]
    of_parts = {name: spread([part[name] for part in counted]) for name in counted[0]}
    bench.result["ppo"] = {
        "by": "the steps of TRL's PPOTrainer by hand on transformers and PEFT; TRL itself is not used",
        "answers": args.batch, "epochs": args.ppo_epochs, "micro_batch": micro, "checkpointing": is_checkpointed,
        "iteration_s": seconds, "parts_s": of_parts, "peak_bytes": bench.peak(),
    }
    checkpointing(model, False)
    bench.write()


def numbers(text):
    return [int(part) for part in text.split(",")]


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", required=True)
    parser.add_argument("--parts", default="sft,generate,ppo")
    parser.add_argument("--seconds", type=float, default=120, help="what all of it may take; later parts are cut short")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--shared-tokens", type=int, default=160)
    parser.add_argument("--own-tokens", type=numbers, default=[40, 140])
    parser.add_argument("--answer-tokens", type=int, default=30)
    parser.add_argument("--sequences", type=numbers, default=[1, 8, 64, 256])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--ppo-epochs", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--micro-batches", type=numbers, default=[8, 16, 32, 64])
    return parser.parse_args()


def main():
    args = arguments()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    bench = Bench(args)
    bench.result["device"] = torch.cuda.get_device_name(bench.device) if bench.on_gpu else "cpu"
    ceilings(bench)
    model = make(bench)
    bench.write()
    for name in args.parts.split(","):
        try:
            {"sft": measure_sft, "generate": measure_generate, "ppo": measure_ppo}[name](bench, model)
        except Exception as error:  # the other parts are measured anyway
            bench.result["left_out"].append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            with contextlib.suppress(Exception):
                model.zero_grad(set_to_none=True)
            print(f"{name} is left out: {error}", file=sys.stderr)
        bench.write()
    print(json.dumps(bench.result, indent=1))


main()
