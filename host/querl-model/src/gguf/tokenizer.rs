//! A byte-level BPE tokenizer as metadata of a GGUF file.
//!
//! llama.cpp has no regular expressions of its own in a file, but names of pre-tokenizers that are compiled in. The one that is written gives
//! the same tokens as the model's tokenizer for generated texts; there is none for some tokenizers, which are refused. llama.cpp does not
//! normalize: a text that is not in NFC has other tokens there.

use super::writer::MetadataValue;
use crate::chat_template::token_text;
use crate::checkpoint::required;
use crate::export::read_json;
use crate::random::{STEP, mix};
use crate::{ModelError, TextTokenizer};
use querl_core::records::Message;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use tokenizers::{AddedToken, Tokenizer};

/// Metadata of a tokenizer in a GGUF file.
pub(super) struct GgufTokenizer {
    pub(super) metadata: Vec<(String, MetadataValue)>,
    pub(super) pre_tokenizer: &'static str,
}

/// A pre-tokenizer of llama.cpp. Each expression splits the pieces of the previous one; text that does not match is a piece, too.
struct PreTokenizer {
    name: &'static str,
    expressions: &'static [&'static str],
    /// A piece that is a token of the vocabulary becomes that token without merges.
    ignores_merges: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Source: `llm_tokenizer_bpe` in `src/llama-vocab.cpp`, with the expressions that its comments call the original ones.
const PRE_TOKENIZERS: [PreTokenizer; 7] = [
    PreTokenizer {
        name: "qwen2",
        expressions: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignores_merges: false,
    },
    PreTokenizer { name: "llama-bpe", expressions: &[LLAMA3], ignores_merges: true },
    PreTokenizer { name: "smaug-bpe", expressions: &[LLAMA3], ignores_merges: false },
    PreTokenizer {
        name: "tekken",
        expressions: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignores_merges: true,
    },
    // Splits punctuation, words and numbers: for tokenizers whose tokens have one of these kinds each, such as those of `querl model
    // pretrain`.
    PreTokenizer {
        name: "falcon",
        expressions: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
        ignores_merges: false,
    },
    PreTokenizer { name: "gpt-2", expressions: &[GPT2], ignores_merges: false },
    PreTokenizer { name: "smollm", expressions: &[r"\p{N}", GPT2], ignores_merges: false },
];

// `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// The tokenizer and chat template of a model directory. `vocab_size`: rows of the embedding; missing tokens are padded.
pub(super) fn read(model: &Path, vocab_size: usize) -> Result<GgufTokenizer, ModelError> {
    let path = required(model, "tokenizer.json")?;
    let file = read_json(&path)?;
    let refused = |problem: String| ModelError::bad_file(&path, problem);
    check(&file).map_err(refused)?;
    let text_tokenizer = TextTokenizer::load(model)?;
    let tokenizer = load(&file)?;
    let (mut tokens, mut types) = vocabulary(&file, vocab_size).map_err(refused)?;
    let (pre_tokenizer, separate) = find_pre_tokenizer(&file, &tokenizer).map_err(refused)?;
    for (text, id) in separate {
        (tokens[id as usize], types[id as usize]) = (text, USER_DEFINED);
    }
    let ids = special_ids(model, &tokenizer, &text_tokenizer, vocab_size)?;
    let bos = ids.get("bos").copied();
    let mut metadata = vec![
        ("tokenizer.ggml.model".to_owned(), MetadataValue::Text("gpt2".into())),
        ("tokenizer.ggml.pre".to_owned(), MetadataValue::Text(pre_tokenizer.into())),
        ("tokenizer.ggml.tokens".to_owned(), MetadataValue::Texts(tokens)),
        ("tokenizer.ggml.token_type".to_owned(), MetadataValue::I32s(types)),
        ("tokenizer.ggml.merges".to_owned(), MetadataValue::Texts(merges(&file).map_err(refused)?)),
    ];
    let id_key = |(name, id): (&str, u32)| (format!("tokenizer.ggml.{name}_token_id"), MetadataValue::U32(id));
    metadata.extend(ids.into_iter().map(id_key));
    let add_bos = bos.is_some() && begins_with(&text_tokenizer, bos);
    metadata.push(("tokenizer.ggml.add_bos_token".to_owned(), MetadataValue::Bool(add_bos)));
    metadata.push(("tokenizer.ggml.add_eos_token".to_owned(), MetadataValue::Bool(false)));
    let template = text_tokenizer.template().text().to_owned();
    metadata.push(("tokenizer.chat_template".to_owned(), MetadataValue::Text(template)));
    Ok(GgufTokenizer { metadata, pre_tokenizer })
}

fn load(file: &Value) -> Result<Tokenizer, ModelError> {
    let text = serde_json::to_vec(file).map_err(|error| ModelError::Tokenizer(error.to_string()))?;
    Tokenizer::from_bytes(text).map_err(|error| ModelError::Tokenizer(error.to_string()))
}

/// Refuses tokenizers that are not byte-level BPE, or have settings that llama.cpp does not support.
fn check(file: &Value) -> Result<(), String> {
    let model = &file["model"];
    let kind = model["type"].as_str().unwrap_or("BPE");
    let is_byte_level = file["pre_tokenizer"].to_string().contains("\"ByteLevel\"");
    if kind != "BPE" || !is_byte_level || model["byte_fallback"] == true {
        return Err(format!(
            "a tokenizer of the type {kind} that is not byte-level; expected byte-level BPE, as Qwen and Llama 3 have"
        ));
    }
    if !(file["normalizer"].is_null() || file["normalizer"]["type"] == "NFC") {
        return Err(format!("its normalizer is {}; llama.cpp has none for byte-level BPE", file["normalizer"]["type"]));
    }
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[key].as_str().is_some_and(|text| !text.is_empty()) {
            return Err(format!("`{key}` is {}; llama.cpp has no such setting", model[key]));
        }
    }
    let strips = |token: &&Value| ["lstrip", "rstrip", "single_word"].iter().any(|key| token[key] == true);
    match file["added_tokens"].as_array().and_then(|tokens| tokens.iter().find(strips)) {
        Some(token) => {
            Err(format!("the added token {} takes spaces next to it; llama.cpp has no such setting", token["content"]))
        }
        None => Ok(()),
    }
}

/// Text and type of each token.
fn vocabulary(file: &Value, vocab_size: usize) -> Result<(Vec<String>, Vec<i32>), String> {
    let mut tokens: Vec<Option<(String, i32)>> = vec![None; vocab_size];
    let mut put = |id: Option<u64>, text: &str, kind| match id.and_then(|id| tokens.get_mut(id as usize)) {
        Some(token) => {
            *token = Some((text.to_owned(), kind));
            Ok(())
        }
        None => Err(format!("the id of the token `{text}` is not below {vocab_size}, the vocab_size of config.json")),
    };
    for (text, id) in file["model"]["vocab"].as_object().ok_or("`model.vocab` is missing")? {
        put(id.as_u64(), text, NORMAL)?;
    }
    for token in file["added_tokens"].as_array().into_iter().flatten() {
        let text = token["content"].as_str().unwrap_or_default();
        let is_control = token["special"] == true || (text.starts_with("<|") && text.ends_with("|>"));
        put(token["id"].as_u64(), text, if is_control { CONTROL } else { USER_DEFINED })?;
    }
    let filled = |(id, token): (usize, Option<_>)| token.unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED));
    Ok(tokens.into_iter().enumerate().map(filled).unzip())
}

/// Each merge as `LEFT RIGHT`.
fn merges(file: &Value) -> Result<Vec<String>, String> {
    let merge = |merge: &Value| match merge {
        Value::String(text) => Some(text.clone()),
        Value::Array(pair) => Some(format!("{} {}", pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        _ => None,
    };
    let merges = file["model"]["merges"].as_array().and_then(|merges| merges.iter().map(merge).collect());
    merges.ok_or_else(|| "`model.merges` is not a list of pairs".into())
}

/// Ids of special tokens by llama.cpp's names. Additional stop tokens become its end-of-turn and end-of-message tokens.
fn special_ids(
    model: &Path,
    tokenizer: &Tokenizer,
    text_tokenizer: &TextTokenizer,
    vocab_size: usize,
) -> Result<BTreeMap<&'static str, u32>, ModelError> {
    let (of_tokenizer, of_model) =
        (read_json(&required(model, "tokenizer_config.json")?)?, read_json(&required(model, "config.json")?)?);
    let named = |name: &str| {
        let text = token_text(&of_tokenizer[format!("{name}_token")]);
        let in_config = || u32::try_from(of_model[format!("{name}_token_id")].as_u64()?).ok();
        text.and_then(|text| tokenizer.token_to_id(&text)).or_else(in_config)
    };
    let mut ids = BTreeMap::new();
    for (name, key) in [("bos", "bos"), ("pad", "padding"), ("unk", "unknown")] {
        ids.extend(named(name).filter(|id| (*id as usize) < vocab_size).map(|id| (key, id)));
    }
    let eos = text_tokenizer.eos_id();
    ids.insert("eos", eos);
    let others = text_tokenizer.stop_ids().iter().copied().filter(|id| *id != eos && (*id as usize) < vocab_size);
    ids.extend(["eot", "eom"].into_iter().zip(others));
    Ok(ids)
}

/// True if the chat template begins with `bos`. llama.cpp then adds it, and the template must not add it again.
fn begins_with(tokenizer: &TextTokenizer, bos: Option<u32>) -> bool {
    let message = Message { role: "user".into(), content: "a".into() };
    tokenizer.encode_prompt(&[message]).is_ok_and(|ids| ids.first().copied() == bos)
}

/// Whitespace tokens that are split off before pre-tokenization, with their ids.
type SeparateTokens = Vec<(String, u32)>;

/// The pre-tokenizer of llama.cpp that gives the same tokens as `tokenizer`, if necessary with whitespace tokens that are split off first.
fn find_pre_tokenizer(file: &Value, tokenizer: &Tokenizer) -> Result<(&'static str, SeparateTokens), String> {
    let texts = sample_texts(tokenizer);
    let expected = texts.iter().map(|text| ids(tokenizer, text)).collect::<Result<Vec<_>, _>>()?;
    let pattern = file["pre_tokenizer"].to_string();
    let mut candidates: Vec<&PreTokenizer> = PRE_TOKENIZERS.iter().collect();
    // Pre-tokenizers with an equal expression first, because a comparison takes half a second with a large vocabulary.
    candidates.sort_by_key(|candidate| !pattern.contains(&json!(candidate.expressions[0]).to_string()));
    let spaces = whitespace_tokens(tokenizer);
    let mut difference = String::new();
    for separate in [Vec::new(), spaces] {
        for candidate in &candidates {
            match candidate.difference(file, &separate, &texts, &expected)? {
                None => return Ok((candidate.name, separate)),
                Some(text) => difference = text,
            }
        }
    }
    let names: Vec<&str> = PRE_TOKENIZERS.iter().map(|candidate| candidate.name).collect();
    Err(format!(
        "its pre-tokenizer is none of those of llama.cpp that querl knows ({}): {difference:?} has other tokens with each of them",
        names.join(", ")
    ))
}

impl PreTokenizer {
    /// The first text that has other tokens with llama.cpp.
    fn difference(
        &self,
        file: &Value,
        separate: &SeparateTokens,
        texts: &[String],
        expected: &[Vec<u32>],
    ) -> Result<Option<String>, String> {
        let mut file = file.clone();
        let split = |expression: &&str| json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false});
        let mut steps: Vec<Value> = self.expressions.iter().map(split).collect();
        steps.push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}));
        file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps});
        file["model"]["ignore_merges"] = self.ignores_merges.into();
        let mut tokenizer = load(&file).map_err(|error| error.to_string())?;
        let added = separate.iter().map(|(text, _)| AddedToken::from(text.as_str(), false).normalized(false));
        tokenizer.add_tokens(added).map_err(|error| error.to_string())?;
        let own: HashMap<u32, u32> =
            separate.iter().filter_map(|(text, id)| Some((tokenizer.token_to_id(text)?, *id))).collect();
        for (text, expected) in texts.iter().zip(expected) {
            let found = ids(&tokenizer, text)?.into_iter().map(|id| *own.get(&id).unwrap_or(&id));
            if !found.eq(expected.iter().copied()) {
                return Ok(Some(text.clone()));
            }
        }
        Ok(None)
    }
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, String> {
    let encoding = tokenizer.encode_fast(text, false).map_err(|error| error.to_string())?;
    Ok(encoding.get_ids().to_vec())
}

/// The tokens that consist of two or more spaces or line breaks.
fn whitespace_tokens(tokenizer: &Tokenizer) -> SeparateTokens {
    let token = |id| tokenizer.decode(&[id], true).ok().map(|text| (text, id));
    let all = (0..tokenizer.get_vocab_size(false) as u32).filter_map(token);
    all.filter(|(text, _)| text.len() > 1 && text.chars().all(char::is_whitespace)).collect()
}

const N_TEXTS: usize = 1000;
const N_PIECES: usize = 12;

/// Texts for which pre-tokenizers differ: contractions, digits, spaces, line breaks, scripts, symbols, joined emoji.
const TEXTS: [&str; 6] = [
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n line\r\n\r\nline",
    "I've seen he's there, 'RE you sure? 'M not sure, we'll 'test' it; We'Ve a'lL",
    "3 33 333 3333 33333 3.3 3..3 3...3 2025年11月26日 13800138000 ①②３４",
    "胶原蛋白怎么吃？我想在apple工作1314151天～“引号”（括号）……——《书名》：；、。",
    "🚀 (normal) 😶\u{200d}🌫️ ✅ 🦙🦙 កាន់តែពិសេសអាច😁 нещо на Български عربي हिन्दी",
    "fn main() { let x_1 = \"a\\n\"; } // ------=======```` <b>&amp;</b> $5 + 3% @me #tag\u{a0}\u{3000}全角",
];

/// Texts on which tokenizers are compared: those of [`TEXTS`], and tokens of the vocabulary in random order with separators.
fn sample_texts(tokenizer: &Tokenizer) -> Vec<String> {
    const SEPARATORS: [&str; 14] = ["", "", "", "", " ", "  ", "\n", "\n\n", "，", "。", "、", "'", "3", "℃"];
    let n_tokens = tokenizer.get_vocab_size(false) as u64;
    let mut state = 0u64;
    let mut below = |bound: u64| {
        state = state.wrapping_add(STEP);
        mix(state) % bound.max(1)
    };
    let mut texts: Vec<String> = TEXTS.iter().map(|text| (*text).to_owned()).collect();
    while texts.len() < N_TEXTS {
        let mut text = String::new();
        for _ in 0..N_PIECES {
            let token = tokenizer.decode(&[below(n_tokens) as u32], true).unwrap_or_default();
            text += token.trim_matches('\u{fffd}');
            text += SEPARATORS[below(SEPARATORS.len() as u64) as usize];
        }
        texts.push(text);
    }
    texts
}
