"""Tiny random BERT and XLM-RoBERTa checkpoints with transformers' results for a few texts, in golden/encoders/<name>/.

Embedding models (BERT with CLS pooling, XLM-RoBERTa with mean pooling) and cross-encoders with one label. Weights are far from their usual
initial values, so that a missing norm, bias, position or token type is detected. Texts have different lengths and one exceeds the model's maximum,
so that padding and truncation are tested. There are three kinds of tokenizers: one token per character; WordPiece as in bge models for Chinese;
Unigram with a normalization table as in bge-m3 and bge-reranker-base, whose second texts have another token type, which XLM-RoBERTa must
ignore.
"""

import json
import shutil
import struct

from common import GOLDEN, generator, rounded, write_json
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

TEXTS = ["鱼油怎么吃", "深海鱼油软胶囊一天两粒，饭后服用。", "价格", "饭" * 60]
QUERY = "鱼油一天吃几粒"
# With letters, accents, full-width characters, runs of spaces and a character that no vocabulary has.
MIXED = ["FishOil 1000mg怎么吃", "Ｆｉｓｈ　oil，一天 两粒 café fishoiled", "价格  ①龘", "fish" * 40 + "饭" * 20]
MIXED_QUERY = "ＥＰＡ fish oil 一天吃几粒"

SHARED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_act": "gelu",
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
BERT = SHARED | {"model_type": "bert", "max_position_embeddings": 40, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
ROBERTA = SHARED | {"model_type": "xlm-roberta", "max_position_embeddings": 42, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
ROBERTA |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}

# name: (seed, config, tokenizer, kind of result)
VARIANTS = {
    "bert-cls": (61, BERT | {"pad_token_id": 0}, "characters", "cls"),
    "xlm-roberta-mean": (62, ROBERTA, "characters", "mean"),
    "bert-reranker": (63, BERT | {"pad_token_id": 0}, "characters", "scores"),
    "xlm-roberta-reranker": (64, ROBERTA, "characters", "scores"),
    "bert-wordpiece": (65, BERT | {"pad_token_id": 0}, "wordpiece", "cls"),
    "xlm-roberta-unigram": (66, ROBERTA, "unigram", "mean"),
    "xlm-roberta-unigram-reranker": (67, ROBERTA, "unigram", "scores"),
}
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]


def characters(kind):
    """One token per character, between the special tokens of the model."""
    special = BERT_TOKENS if kind == "bert" else ROBERTA_TOKENS
    letters = sorted(set("".join(TEXTS) + QUERY))
    vocab = {token: index for index, token in enumerate(special + letters)}
    unknown = "[UNK]" if kind == "bert" else "<unk>"
    made = Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if kind == "bert":
        made.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    else:
        frame = processors.RobertaProcessing(("</s>", vocab["</s>"]), ("<s>", vocab["<s>"]), add_prefix_space=False)
        made.post_processor = frame
    return made, len(vocab)


def wordpiece():
    """As bge-small-zh: lower case, without accents, each Chinese character separate, longest match first."""
    pieces = ["fish", "oil", "##oil", "##ed", "##mg", "1000", "100", "##0", "cafe", "epa", "##a", "f", "，"]
    letters = sorted({letter for letter in "".join(MIXED) + MIXED_QUERY if "一" <= letter <= "鿿" and letter != "龘"})
    vocab = {token: index for index, token in enumerate(BERT_TOKENS + pieces + letters)}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    frame = {"single": "[CLS]:0 $A:0 [SEP]:0", "pair": "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"}
    ends = [(token, vocab[token]) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(**frame, special_tokens=ends)
    return made, len(vocab)


def charsmap(rules):
    """A normalization table in SentencePiece's format: length of a double array, the array, the zero-terminated replacements.

    Each node has its own block of 256 units: a child is at the block's start plus its byte, the node's value at the start.
    """
    nodes, values, texts = {b"": 0}, {}, b""
    for source, text in rules.items():
        source = source.encode()
        for length in range(1, len(source) + 1):
            nodes.setdefault(source[:length], len(nodes))
        values[source] = len(texts)
        texts += text.encode() + b"\0"
    start = {prefix: 256 * (1 + number) for prefix, number in nodes.items()}
    place = {prefix: start[prefix[:-1]] + prefix[-1] if prefix else 0 for prefix in nodes}
    units = [0] * (256 * (1 + len(nodes)))
    for prefix in nodes:
        label = prefix[-1] if prefix else 0
        units[place[prefix]] |= label | (prefix in values) << 8 | (place[prefix] ^ start[prefix]) << 10
        if prefix in values:
            units[start[prefix]] |= values[prefix] | 1 << 31
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + texts


def unigram():
    """As bge-m3: a normalization table, runs of spaces merged, a marker before each word, most likely segmentation."""
    pieces = {"▁": -2.0, "▁fish": -3.0, "fish": -4.0, "▁Fish": -3.5, "oil": -3.0, "▁oil": -3.0, "Oil": -3.5, "ed": -4.0, "mg": -4.0}
    pieces |= {"1000": -4.0, "1": -5.0, "0": -5.0, "cafe": -6.0, "c": -7.0, "a": -7.0, "f": -7.0, "é": -7.0, "EPA": -5.0, "F": -7.0}
    pieces |= {"一天": -4.0, "▁一天": -4.5, "怎么吃": -3.0, ",": -4.0}
    letters = sorted({letter for letter in "".join(MIXED) + MIXED_QUERY if "一" <= letter <= "鿿" and letter != "龘"})
    vocab = [(token, 0.0) for token in ROBERTA_TOKENS] + list(pieces.items()) + [(letter, -6.0) for letter in letters]
    made = Tokenizer(models.Unigram(vocab, unk_id=3, byte_fallback=False))
    full_width = {chr(0xFEE0 + ord(letter)): letter for letter in "EFPAish,1"} | {"　": " ", "①": "1"}
    table = normalizers.Precompiled(charsmap(full_width))
    made.normalizer = normalizers.Sequence([table, normalizers.Replace(Regex(" {2,}"), " ")])
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    made.pre_tokenizer = pre_tokenizers.Sequence(words)
    frame = {"single": "<s>:0 $A:0 </s>:0", "pair": "<s>:0 $A:0 </s>:0 </s>:0 $B:1 </s>:1"}
    made.post_processor = processors.TemplateProcessing(**frame, special_tokens=[("<s>", 0), ("</s>", 2)])
    return made, len(vocab)


def tokenizer(kind, sort):
    made, vocab_size = {"characters": lambda: characters(kind), "wordpiece": wordpiece, "unigram": unigram}[sort]()
    if kind == "bert":
        names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        names = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names), vocab_size


def randomise(model, seed):
    source = generator(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=source)
            parameter.copy_(1 + 0.3 * noise if "LayerNorm.weight" in name else 0.25 * noise)


def make(name, seed, settings, sort, made):
    folder = GOLDEN / "encoders" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kind = settings["model_type"]
    tokens, vocab_size = tokenizer(kind, sort)
    texts, query = (TEXTS, QUERY) if sort == "characters" else (MIXED, MIXED_QUERY)
    settings = settings | {"vocab_size": vocab_size}
    model_type = settings.pop("model_type")
    if made == "scores":
        config = AutoConfig.for_model(model_type, num_labels=1, **settings)
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    else:
        config = AutoConfig.for_model(model_type, **settings)
        model = AutoModel.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    randomise(model, seed)
    model.save_pretrained(folder, safe_serialization=True)
    tokens.backend_tokenizer.save(str(folder / "tokenizer.json"))
    longest = settings["max_position_embeddings"] - (0 if kind == "bert" else settings["pad_token_id"] + 1)
    cut = {"padding": True, "truncation": "longest_first", "max_length": longest, "return_tensors": "pt"}
    # transformers' XLM-RoBERTa tokenizers return no token types, and the network has only one.
    with_types = kind == "bert"
    with torch.no_grad():
        if made == "scores":
            batch = tokens([query] * len(texts), texts, return_token_type_ids=with_types, **cut)
            expected = {"query": query, "texts": texts, "logits": model(**batch).logits[:, 0]}
        else:
            batch = tokens(texts, return_token_type_ids=with_types, **cut)
            states = model(**batch).last_hidden_state  # (B, T, H)
            mask = batch["attention_mask"].unsqueeze(-1)
            pooled = states[:, 0] if made == "cls" else (states * mask).sum(1) / mask.sum(1)
            expected = {"texts": texts, "vectors": torch.nn.functional.normalize(pooled, dim=-1)}
            if made == "mean":
                (folder / "1_Pooling").mkdir()
                modes = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
                (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes) + "\n")
    expected["ids"] = batch["input_ids"].tolist()
    write_json(folder / "expected.json", rounded(expected))


for name, (seed, settings, sort, made) in VARIANTS.items():
    make(name, seed, settings, sort, made)
