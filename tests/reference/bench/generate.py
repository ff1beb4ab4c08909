"""One setting of transformers' generate: tokens per second of `--n` samples for each prompt of a file.

`prefix-by-hand` is not a setting of generate: the shared prefix is computed once into a KV cache, which is copied for every row.
It is measured as a note, because a user who knows the shared prefix could do it.
"""

from pathlib import Path

from common import Stopwatch, WORK, load_model, options, report, rows, with_adapter
import torch
from transformers import DynamicCache, GenerationConfig

SETTINGS = {
    "n": {},
    "n-eager": {"attn": "eager"},
    "n-static": {"cache": "static"},
    "repeated": {"repeat": 1},
    "n-batch-8": {"batch": 8},
    "n-adapter": {"adapter": 1},
    "prefix-by-hand": {"repeat": 1, "prefix": 1},
}


def batches(prompts, settings):
    """Batches `(rows, tokens)`. All prompts of the comparison have the same length, so that nothing is padded."""
    if settings.repeat:
        prompts = [prompt for prompt in prompts for _ in range(settings.n)]
    size = settings.batch or len(prompts)
    return [torch.tensor(prompts[start : start + size]) for start in range(0, len(prompts), size)]


def common_prefix(ids):
    same = (ids == ids[0]).all(0).long()
    return min(int(same.cumprod(0).sum()), ids.shape[1] - 1)


def prefix_cache(model, ids):
    """KV cache of the common prefix, one copy per row."""
    cache = DynamicCache(config=model.config)
    model(ids[:1, : common_prefix(ids)], past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(ids.shape[0])
    return cache


def n_answer_tokens(answers, eos):
    """Number of tokens up to and including the first end-of-sequence."""
    ended = (answers == eos).long().cumsum(1)
    return int(((ended == 0) | ((ended == 1) & (answers == eos))).sum())


def main():
    settings = options(
        __doc__.splitlines()[0],
        data=str(WORK / "prompts.json"), name="", n=4, max_new=32, repeats=2, limit=0,
        attn="sdpa", cache="", repeat=0, batch=0, adapter=0, prefix=0,
    )  # fmt: skip
    vars(settings).update(SETTINGS.get(settings.name, {}))
    torch.manual_seed(0)
    model = load_model(settings, settings.attn).eval()
    if settings.adapter:
        model = with_adapter(model, Path(settings.model) / "adapter", trainable=False)
    prompts = rows(settings.data)[: settings.limit or None]
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=settings.max_new,
        num_return_sequences=1 if settings.repeat else settings.n, eos_token_id=2, pad_token_id=0,
        cache_implementation=settings.cache or None, disable_compile=True,
    )  # fmt: skip
    stopwatch, n_tokens = Stopwatch(), []
    for _ in range(settings.repeats):
        with stopwatch, torch.inference_mode():
            total = 0
            for ids in batches(prompts, settings):
                kept = {"past_key_values": prefix_cache(model, ids)} if settings.prefix else {}
                output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **kept)
                total += n_answer_tokens(output[:, ids.shape[1] :], 2)
        n_tokens.append(total)
    report(stopwatch, tokens=n_tokens)


if __name__ == "__main__":
    main()
