"""Makes a judge of two million parameters: examples/tiny-qwen3, fine-tuned to answer the tenant's judging prompt.

The judge only distinguishes whether a rewrite belongs to its query (4.5) or was written for another one (0.5). It exists so that judgements in
the right form come from a model behind a third-party server; its scores are not meaningful.

    tests/foreign/.venv/bin/python tests/foreign/judge_model.py FOLDER
"""

import json
import random
import re
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
N_STEPS, N_ROWS = 200, 8
ANSWERS = {True: (4.5, "意图与产品都保留"), False: (0.5, "改变了用户意图")}


def judging_prompts():
    """System prompt and request, read from the plugin's source."""
    texts = []
    for path, name in [("tenant-fivedoctors/src/lib.rs", "judge_system"), ("shared/tenant-common/src/lib.rs", "JUDGE_REQUEST")]:
        source = (ROOT / "plugins" / path).read_text()
        text = re.search(rf'{name}(?:: &str)?\s*[:=]\s*"((?:[^"\\]|\\.)*)"', source)[1]
        texts.append(text.replace('\\"', '"'))
    return texts


def conversations(tokenizer, rows, draw):
    """(prompt tokens, all tokens) of sampled pairs of query and rewrite."""
    system, request = judging_prompts()
    for row in draw.sample(rows, N_ROWS):
        fits = draw.random() < 0.5
        rewrite = (row if fits else draw.choice(rows))["rewritten_query"]
        lines = [f"原始查询: {row['original_query']}"]
        lines += [f"{name}: {row[key]}" for name, key in [("用户画像", "user_profile"), ("历史摘要", "history_summary")] if row.get(key)]
        user = "\n".join(lines) + f"\n改写后的查询: {rewrite}\n\n{request}"
        score, reason = ANSWERS[rewrite == row["rewritten_query"]]
        answer = json.dumps({"综合得分": score, "评分理由": reason}, ensure_ascii=False)
        prompt = tokenizer.apply_chat_template(
            [{"role": "system", "content": system}, {"role": "user", "content": user}], add_generation_prompt=True, tokenize=False
        )
        prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer + tokenizer.eos_token))
        yield prompt, prompt + answer


def main(folder):
    torch.manual_seed(0)
    draw = random.Random(0)
    source = ROOT / "examples/tiny-qwen3"
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rows = [json.loads(line) for line in (ROOT / "examples/fivedoctors/teacher_rewrites.jsonl").read_text().splitlines()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(N_STEPS):
        pairs = list(conversations(tokenizer, rows, draw))
        width = max(len(tokens) for _, tokens in pairs)
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for _, tokens in pairs])
        labels = torch.tensor([[-100] * len(prompt) + tokens[len(prompt) :] + [-100] * (width - len(tokens)) for prompt, tokens in pairs])
        mask = torch.tensor([[1] * len(tokens) + [0] * (width - len(tokens)) for _, tokens in pairs])
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == N_STEPS - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
