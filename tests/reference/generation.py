"""Logits processors, greedy decoding and beam search, in golden/generation.json.

Processors get only the response as input ids, in the order of `_get_logits_processor`: querl's limits do not depend on the prompt. Searches run on
the checkpoints of decoders.py; a stop token is a token of the greedy response.
"""

from common import GOLDEN, generator, write_json
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import logits_process as lp

VOCAB = 60
DEFAULT = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
}
ANSWER = [5, 9, 5, 9, 12, 5, 9]
STOP_IDS = [3, 7]
CASES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_k larger than the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.8},
    "top_p at a low temperature": {"top_p": 0.5, "temperature": 0.3},
    "top_p so small that one token is left": {"top_p": 0.01},
    "top_k and top_p": {"top_k": 12, "top_p": 0.7, "temperature": 1.4},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3},
    "min_new_tokens not reached": {"min_new_tokens": 8},
    "min_new_tokens reached": {"min_new_tokens": 7},
    "all of them": {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 30,
    },
}


def processors(settings):
    chain = lp.LogitsProcessorList()
    if settings["repetition_penalty"] != 1.0:
        chain.append(lp.RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    if settings["no_repeat_ngram_size"]:
        chain.append(lp.NoRepeatNGramLogitsProcessor(settings["no_repeat_ngram_size"]))
    if settings["min_new_tokens"]:
        chain.append(lp.MinNewTokensLengthLogitsProcessor(0, settings["min_new_tokens"], STOP_IDS))
    if settings["temperature"] != 1.0:
        chain.append(lp.TemperatureLogitsWarper(settings["temperature"]))
    if settings["top_k"]:
        chain.append(lp.TopKLogitsWarper(settings["top_k"]))
    if settings["top_p"] < 1.0:
        chain.append(lp.TopPLogitsWarper(settings["top_p"]))
    return chain


def processed():
    cases = []
    for seed, (name, changes) in enumerate(CASES.items()):
        settings = DEFAULT | changes
        logits = torch.randn(1, VOCAB, generator=generator(seed)) * 2
        scores = processors(settings)(torch.tensor([ANSWER]), logits.clone())
        logprobs = scores.log_softmax(-1)[0]
        cases.append({
            "name": name,
            "settings": settings,
            "logits": logits[0],
            # Tokens with nonzero probability, and the log-probability of each.
            "kept": logprobs.isfinite().nonzero().flatten(),
            "logprobs": logprobs[logprobs.isfinite()],
        })  # fmt: skip
    return {"answer": ANSWER, "stop_ids": STOP_IDS, "cases": cases}


PROMPTS = [[5, 9, 2, 7], [5, 9, 2, 7, 11, 30], [5, 9, 44], [17]]
MAX_NEW = 10
SEARCHES = [(1, 1.0, 0), (2, 1.0, 0), (3, 0.0, 0), (3, 1.0, 0), (3, 2.5, 0), (4, -1.0, 0), (3, 1.0, 6)]


def searched(name):
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "decoders" / name, attn_implementation="eager").eval()
    greedy = model.generate(torch.tensor([PROMPTS[0]]), generation_config=GenerationConfig(max_new_tokens=MAX_NEW, eos_token_id=None, pad_token_id=0))
    stop_ids = sorted({greedy[0, len(PROMPTS[0]) + 5].item(), 33})
    cases = []
    for n_beams, length_penalty, min_new_tokens in SEARCHES:
        for prompt in PROMPTS:
            config = GenerationConfig(
                num_beams=n_beams, num_return_sequences=min(n_beams, 2), length_penalty=length_penalty,
                min_new_tokens=min_new_tokens or None, max_new_tokens=MAX_NEW, eos_token_id=stop_ids, pad_token_id=0,
                early_stopping=False, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            found = model.generate(torch.tensor([prompt]), generation_config=config)
            answers = []
            for row in found.sequences[:, len(prompt) :].tolist():
                ends = [i for i, token in enumerate(row) if token in stop_ids]
                answers.append(row[: ends[0] + 1] if ends else row)
            scores = found.sequences_scores if n_beams > 1 else []
            cases.append({
                "prompt": prompt, "n_beams": n_beams, "length_penalty": length_penalty, "min_new_tokens": min_new_tokens,
                "answers": answers, "scores": scores,
            })  # fmt: skip
    return {"decoder": name, "stop_ids": stop_ids, "max_new_tokens": MAX_NEW, "cases": cases}


def main():
    with torch.inference_mode():
        searches = [searched(name) for name in ("qwen2-tied", "qwen3-untied")]
    write_json(GOLDEN / "generation.json", {"processors": processed(), "searches": searches})


if __name__ == "__main__":
    main()
