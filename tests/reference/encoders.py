"""Tiny random BERT and XLM-RoBERTa checkpoints with what transformers makes of a few texts, in golden/encoders/<name>/.

Two embedding models (BERT with the first token's state, XLM-RoBERTa with the mean) and two cross-encoders with one label. Weights are
far from their usual initial values, so that a missing norm, bias, position or token type shows. Texts are of different lengths, one
is longer than the model takes, so that padding and cutting show too.
"""

import json
import shutil

from common import GOLDEN, generator, rounded, write_json
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

TEXTS = ["鱼油怎么吃", "深海鱼油软胶囊一天两粒，饭后服用。", "价格", "饭" * 60]
QUERY = "鱼油一天吃几粒"

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

# name: (seed, config, what is made of it)
VARIANTS = {
    "bert-cls": (61, BERT | {"pad_token_id": 0}, "cls"),
    "xlm-roberta-mean": (62, ROBERTA, "mean"),
    "bert-reranker": (63, BERT | {"pad_token_id": 0}, "scores"),
    "xlm-roberta-reranker": (64, ROBERTA, "scores"),
}


def tokenizer(kind):
    """One token a character, in the frame of the model."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] if kind == "bert" else ["<s>", "<pad>", "</s>", "<unk>"]
    characters = sorted(set("".join(TEXTS) + QUERY))
    vocab = {token: index for index, token in enumerate(special + characters)}
    unknown = "[UNK]" if kind == "bert" else "<unk>"
    made = Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if kind == "bert":
        frame = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
        names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        frame = processors.RobertaProcessing(("</s>", vocab["</s>"]), ("<s>", vocab["<s>"]), add_prefix_space=False)
        names = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    made.post_processor = frame
    return PreTrainedTokenizerFast(tokenizer_object=made, **names), len(vocab)


def randomise(model, seed):
    source = generator(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=source)
            parameter.copy_(1 + 0.3 * noise if "LayerNorm.weight" in name else 0.25 * noise)


def make(name, seed, settings, made):
    folder = GOLDEN / "encoders" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kind = settings["model_type"]
    tokens, vocab_size = tokenizer(kind)
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
    with torch.no_grad():
        if made == "scores":
            batch = tokens([QUERY] * len(TEXTS), TEXTS, return_token_type_ids=True, **cut)
            expected = {"query": QUERY, "texts": TEXTS, "logits": model(**batch).logits[:, 0]}
        else:
            batch = tokens(TEXTS, return_token_type_ids=True, **cut)
            states = model(**batch).last_hidden_state  # (B, T, H)
            mask = batch["attention_mask"].unsqueeze(-1)
            pooled = states[:, 0] if made == "cls" else (states * mask).sum(1) / mask.sum(1)
            expected = {"texts": TEXTS, "vectors": torch.nn.functional.normalize(pooled, dim=-1)}
            if made == "mean":
                (folder / "1_Pooling").mkdir()
                modes = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
                (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes) + "\n")
    expected["ids"] = batch["input_ids"].tolist()
    write_json(folder / "expected.json", rounded(expected))


for name, (seed, settings, made) in VARIANTS.items():
    make(name, seed, settings, made)
