"""Writes corpus.jsonl, the text that the tiny model is pretrained on.

Sources: the example shop's knowledge base and lexicon, and the *training* split that `querl convert` made. Queries of the
validation and test splits are never read. Everything is drawn from one seeded generator: the same inputs give the same file.

    python3 make_corpus.py ../fivedoctors TRAIN_JSONL corpus.jsonl
"""

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

N_SYNTHETIC = 18_000
N_SWAPPED = 30_000
SYSTEM = "你是保健品领域的Query改写专家。"

# How customers put a question around the words that show what they want.
OPENINGS = ["", "", "", "", "请问", "想问下", "亲，", "老板，", "那个", "话说", "问一下", "在吗，", "你好，"]
ENDINGS = ["", "", "", "", "啊", "呀", "呢", "吗", "不", "哈", "？", "呗", "啦", "嘛", "么"]
PRONOUNS = ["", "", "它", "这个", "这款", "那个", "这玩意", "这东西", "这种"]
# How the talk so far is summed up; P is the product meant, A one that was only spoken of before.
HISTORY_ONE = [
    "咨询P", "正在咨询P", "在看P", "刚问过P", "用户在了解P", "一直在聊P", "已下单P", "收到了P", "想买P", "打算给家人买P",
    "刚问过P一盒几瓶", "问过P的价格", "问了P适不适合老人", "问过P的吃法", "上次买过P", "咨询P，担心副作用", "看中P，还在犹豫",
]
HISTORY_TWO = [
    "先看A，后来改问P", "先问了A的价格，后来转而咨询P", "之前问过A，现在在看P", "先问A，又转到P", "嫌A太贵，改看P",
    "比较了A和P，最后选了P", "原先咨询A，后来决定买P", "上周买过A，这次想了解P", "先看A嫌太甜，后来改问P",
]
PROFILES = [
    "28岁女性，备孕", "35岁女，上班族", "52岁男，血脂偏高", "65岁老人，腿脚不便", "孕中期", "哺乳期妈妈", "健身爱好者",
    "学生党", "经常熬夜", "肠胃敏感", "给爸妈买", "给孩子买，6岁", "乳糖不耐受", "糖尿病家属", "减脂期女生", "程序员，久坐",
]


def rewrite_of(rng, product, intent, words):
    """A target: the canonical name and the intent, mostly in everybody's words, as a general model would put it; then,
    for some, a word of the query or the profile."""
    kind = rng.random()
    house, general = intent["house"], intent["general"]
    if kind < 0.25:
        parts = house[: rng.randint(1, len(house))]
    elif kind < 0.9:
        parts = general[: rng.randint(1, min(3, len(general)))]
    else:
        parts = house[:1] + general[:1]
    extra = [rng.choice(words)] if words and rng.random() < 0.35 else []
    return " ".join([product["name"], *parts, *extra])


def words_of_shop(passages):
    """Strings of two or three characters that the knowledge base uses often enough to be words."""
    counts = Counter()
    for passage in passages:
        for run in re.findall(r"[\u4e00-\u9fff]+", passage["text"]):
            counts.update({run[i : i + n] for n in (2, 3) for i in range(len(run) - n + 1)})
    return {word for word, count in counts.items() if count >= 4}


def words_in(text, vocabulary):
    return [text[i : i + n] for n in (3, 2) for i in range(len(text) - n + 1) if text[i : i + n] in vocabulary]


def user_message(query, profile, history):
    lines = [f"原始查询: {query}"]
    if profile:
        lines.append(f"用户画像: {profile}")
    if history:
        lines.append(f"历史摘要: {history}")
    return "\n".join(lines) + "\n\n请改写。"


def chat(system, user, assistant):
    roles = zip(("system", "user", "assistant"), (system, user, assistant))
    return {"messages": [{"role": role, "content": content} for role, content in roles]}


def mention(rng, product):
    return rng.choice([product["name"], *product["aliases"], *product["aliases"]])


def history_for(rng, product, products):
    if rng.random() < 0.6:
        return rng.choice(HISTORY_ONE).replace("P", mention(rng, product))
    other = rng.choice([p for p in products if p["id"] != product["id"]])
    pattern = rng.choice(HISTORY_TWO)
    return "".join(mention(rng, product) if c == "P" else mention(rng, other) if c == "A" else c for c in pattern)


def synthetic(rng, products, intents, vocabulary):
    """A question put together from a cue and a mention of the product, in the query or in the history."""
    product, intent = rng.choice(products), rng.choice(intents)
    cue = rng.choice(intent["cues"] + intent["general"])
    if rng.random() < 0.5:
        named, history = mention(rng, product), ""
        body = rng.choice([named + cue, named + " " + cue, cue + " " + named, named + "，" + cue])
    else:
        body, history = rng.choice(PRONOUNS) + cue, history_for(rng, product, products)
    query = rng.choice(OPENINGS) + body + rng.choice(ENDINGS)
    profile = rng.choice(PROFILES) if rng.random() < 0.6 else ""
    words = words_in(cue + "，" + profile, vocabulary)
    return chat(SYSTEM, user_message(query, profile, history), rewrite_of(rng, product, intent, words))


def find_products(text, products):
    """Mentions in the text, longest first: (start, end, product)."""
    names = sorted(((m, p) for p in products for m in [p["name"], *p["aliases"]]), key=lambda pair: -len(pair[0]))
    found = []
    for name, product in names:
        start = text.find(name)
        while start >= 0:
            end = start + len(name)
            if all(end <= s or start >= e for s, e, _ in found):
                found.append((start, end, product))
            start = text.find(name, end)
    return sorted(found, key=lambda item: item[0])


def swap(rng, text, products, exchange):
    """The text with every product replaced by the one that `exchange` maps it to."""
    out, position = [], 0
    for start, end, product in find_products(text, products):
        out += [text[position:start], mention(rng, exchange[product["id"]])]
        position = end
    return "".join(out) + text[position:]


def swapped(rng, row, products, intents, vocabulary):
    """A training query with its products exchanged for others: the way people write, over the whole range."""
    meta = row["metadata"]
    product_id, intent_id = meta["gold_ids"][0].split("-", 1)
    exchange = dict(zip([p["id"] for p in products], rng.sample(products, len(products))))
    if rng.random() < 0.2:
        exchange = {p["id"]: p for p in products}
    query = swap(rng, meta["original_query"], products, exchange)
    history = swap(rng, meta["history_summary"], products, exchange)
    if not find_products(query + history, products):
        return None  # the text does not determine the product
    intent = next(i for i in intents if i["id"] == intent_id)
    profile = meta["user_profile"] if rng.random() < 0.7 else ""
    plain = swap(rng, meta["original_query"], products, {p["id"]: {"name": "，", "aliases": []} for p in products})
    words = words_in(plain + "，" + profile, vocabulary)
    return chat(SYSTEM, user_message(query, profile, history), rewrite_of(rng, exchange[product_id], intent, words))


def main(shop, train, output):
    rng = random.Random(42)
    passages = [json.loads(line) for line in (Path(shop) / "knowledge_base.jsonl").read_text("utf-8").splitlines()]
    lexicon = json.loads((Path(shop) / "lexicon.json").read_text("utf-8"))
    products, intents = lexicon["products"], lexicon["intents"]
    rows = [json.loads(line) for line in Path(train).read_text("utf-8").splitlines()]
    rows = [row for row in rows if row["metadata"]["gold_ids"] and "-" in row["metadata"]["gold_ids"][0]]
    vocabulary = words_of_shop(passages)
    corpus = [{"text": f"{p['title']}。{p['text']}"} for p in passages for _ in range(4)]
    for product in products:
        for alias in product["aliases"]:
            corpus += [chat("你是保健品店的产品目录。", f"{alias}是哪个产品？", product["name"])] * 2
    corpus += [synthetic(rng, products, intents, vocabulary) for _ in range(N_SYNTHETIC)]
    corpus += filter(None, (swapped(rng, rng.choice(rows), products, intents, vocabulary) for _ in range(N_SWAPPED)))
    rng.shuffle(corpus)
    with open(output, "w", encoding="utf-8") as file:
        for line in corpus:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(f"{len(corpus)} lines written to {output}")


if __name__ == "__main__":
    main(*sys.argv[1:])
