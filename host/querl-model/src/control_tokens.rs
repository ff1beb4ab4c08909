//! Control tokens (`<|im_end|>`): what a chat template writes is a control token, what a user's text contains is text.
//!
//! Source: `split_special_tokens=True` of transformers, which is `encode_special_tokens` of the crate tokenizers. It treats a whole text
//! alike; a prompt has both kinds, so the template's own tokens are encoded through markers, which are tokens of a second tokenizer.

use crate::ModelError;
use crate::chat_template::ChatTemplate;
use querl_core::records::Message;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;
use std::sync::OnceLock;
use tokenizers::{AddedToken, Tokenizer};

/// The control tokens of a tokenizer (special tokens and tokens that act as such), and a copy of the tokenizer that encodes them as text.
pub(crate) struct ControlTokens {
    /// Control tokens with their ids, longest first.
    tokens: Vec<(AddedToken, u32)>,
    first_bytes: BTreeSet<u8>,
    /// Created for the first text that contains a control token: few texts do, and copying a large tokenizer takes 50 ms.
    literal: OnceLock<LiteralTokenizer>,
}

/// A tokenizer without the control tokens; private markers stand for them.
struct LiteralTokenizer {
    tokenizer: Tokenizer,
    /// Marker of each token in [`ControlTokens::tokens`].
    markers: Vec<String>,
    /// Ids of control tokens by the ids of their markers.
    ids: BTreeMap<u32, u32>,
}

/// An occurrence of a control token in a text.
struct Occurrence {
    range: Range<usize>,
    /// Index in [`ControlTokens::tokens`].
    token: usize,
}

impl ControlTokens {
    /// Collects the control tokens: special tokens, the added tokens in `ends` (end of a response, start of a text) even if they are not
    /// marked as special, and those with which the template delimits turns.
    pub(crate) fn of(tokenizer: &Tokenizer, template: &ChatTemplate, ends: &BTreeSet<u32>) -> Self {
        let added = tokenizer.get_added_tokens_decoder().into_iter().map(|(id, token)| (token, id));
        let mut tokens: Vec<(AddedToken, u32)> = added.filter(|(token, _)| !token.content.is_empty()).collect();
        let contents: HashSet<String> = tokens.iter().map(|(token, _)| token.content.clone()).collect();
        let is_named =
            |token: &AddedToken| is_delimiter(&token.content, &contents) && template.text().contains(&token.content);
        let needs_sample = tokens.iter().any(|(token, _)| !token.special && is_named(token));
        let sample = if needs_sample { sample(template) } else { String::new() };
        tokens.retain(|(token, id)| {
            let acts_as_special = ends.contains(id) || (is_named(token) && sample.contains(&token.content));
            token.special || (acts_as_special && is_recognised(tokenizer, token, *id))
        });
        tokens.sort_by_key(|(token, id)| (std::cmp::Reverse(token.content.len()), *id));
        let first_bytes = tokens.iter().filter_map(|(token, _)| token.content.bytes().next()).collect();
        Self { tokens, first_bytes, literal: OnceLock::new() }
    }

    pub(crate) fn are_in(&self, text: &str) -> bool {
        self.next_in(text, 0).is_some()
    }

    /// The first control token at or after byte `from` of the text; the longest if several begin there.
    fn next_in(&self, text: &str, from: usize) -> Option<Occurrence> {
        let bytes = text.as_bytes();
        (from..bytes.len()).filter(|&at| self.first_bytes.contains(&bytes[at])).find_map(|at| {
            let token = self.tokens.iter().position(|(token, _)| bytes[at..].starts_with(token.content.as_bytes()))?;
            Some(Occurrence { range: at..at + self.tokens[token].0.content.len(), token })
        })
    }

    /// Replaces each control token in the text.
    fn replaced(&self, text: &str, mut replacement: impl FnMut(&Occurrence) -> String) -> String {
        let (mut replaced, mut end) = (String::with_capacity(text.len()), 0);
        while let Some(found) = self.next_in(text, end) {
            replaced.push_str(&text[end..found.range.start]);
            replaced.push_str(&replacement(&found));
            end = found.range.end;
        }
        replaced.push_str(&text[end..]);
        replaced
    }

    /// Token ids of a text, with control tokens in it encoded as text.
    pub(crate) fn encode_literally(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, ModelError> {
        ids(&self.literal(tokenizer)?.tokenizer, text)
    }

    /// Token ids of a conversation: control tokens in messages are encoded as text, those that `render` adds as control tokens.
    pub(crate) fn encode_conversation(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        template: &str,
        render: impl FnOnce(&[Message]) -> Result<String, ModelError>,
    ) -> Result<Vec<u32>, ModelError> {
        let literal = self.literal(tokenizer)?;
        let disguise = self.disguise(messages, template)?;
        let hide = |text: &str| self.replaced(text, |found| disguise.hide(&text[found.range.clone()]));
        let hidden: Vec<Message> =
            messages.iter().map(|m| Message { role: hide(&m.role), content: hide(&m.content) }).collect();
        let marked = self.replaced(&render(&hidden)?, |found| literal.markers[found.token].clone());
        let ids = ids(&literal.tokenizer, &disguise.reveal(&marked))?;
        Ok(ids.into_iter().map(|id| literal.ids.get(&id).copied().unwrap_or(id)).collect())
    }

    /// Replaces the characters of control tokens in messages by private-use characters, one for one, so that counting, cutting and trimming
    /// in a template give the same results as with the original text.
    fn disguise(&self, messages: &[Message], template: &str) -> Result<Disguise, ModelError> {
        let texts = messages.iter().flat_map(|message| [message.role.as_str(), &message.content]).chain([template]);
        let taken: HashSet<char> = texts.flat_map(str::chars).collect();
        let originals: BTreeSet<char> = self.tokens.iter().flat_map(|(token, _)| token.content.chars()).collect();
        let mut free = ('\u{f0000}'..='\u{ffffd}').chain('\u{100000}'..='\u{10fffd}').filter(|c| !taken.contains(c));
        let pairs: Option<Vec<(char, char)>> =
            originals.into_iter().map(|original| Some((original, free.next()?))).collect();
        pairs.map(Disguise).ok_or_else(|| {
            let message = "a prompt with a control token uses all private characters (U+F0000 to U+10FFFD); shorten it";
            ModelError::Tokenizer(message.into())
        })
    }

    fn literal(&self, tokenizer: &Tokenizer) -> Result<&LiteralTokenizer, ModelError> {
        if let Some(literal) = self.literal.get() {
            return Ok(literal);
        }
        let made = self.make_literal(tokenizer)?;
        Ok(self.literal.get_or_init(|| made))
    }

    fn make_literal(&self, tokenizer: &Tokenizer) -> Result<LiteralTokenizer, ModelError> {
        // Random per process, so that no text can contain a marker. The markers do not affect the resulting ids.
        let secret = RandomState::new().build_hasher().finish();
        let markers: Vec<String> =
            (0..self.tokens.len()).map(|index| format!("\u{10fffe}{secret:016x}-{index}\u{10ffff}")).collect();
        let added = self.tokens.iter().zip(&markers).map(|((token, _), marker)| AddedToken {
            content: marker.clone(),
            special: false,
            ..token.clone()
        });
        let plain = self.tokens.iter().filter(|(token, _)| !token.special);
        let marked = plain.map(|(token, _)| AddedToken { special: true, ..token.clone() });
        let mut tokenizer = tokenizer.clone();
        tokenizer.set_encode_special_tokens(true);
        tokenizer.add_tokens(added.chain(marked)).map_err(|error| ModelError::Tokenizer(error.to_string()))?;
        let ids = markers.iter().zip(&self.tokens).filter_map(|(m, (_, id))| Some((tokenizer.token_to_id(m)?, *id)));
        let ids = ids.collect();
        Ok(LiteralTokenizer { tokenizer, markers, ids })
    }
}

/// True for the text of a turn delimiter: `<|im_start|>` or `[INST]`. A pair such as `<think>` and `</think>` marks content instead.
fn is_delimiter(text: &str, tokens: &HashSet<String>) -> bool {
    let is_bracketed = (text.starts_with('<') && text.ends_with('>')) || (text.starts_with('[') && text.ends_with(']'));
    let is_markup = match (text.strip_prefix("</"), text.strip_prefix('<')) {
        (Some(name), _) => tokens.contains(&format!("<{name}")),
        (None, Some(name)) => tokens.contains(&format!("</{name}")),
        (None, None) => false,
    };
    is_bracketed && !is_markup
}

/// A rendered conversation without control tokens in its messages; empty if the template refuses it.
fn sample(template: &ChatTemplate) -> String {
    let turns = ["system", "user", "assistant", "user"].map(|role| Message { role: role.into(), content: "1".into() });
    // Some templates refuse a system message.
    template.render(&turns, false).or_else(|_| template.render(&turns[1..], false)).unwrap_or_default()
}

/// True if the tokenizer recognises the token within a text. It does not if a normalizer changes the token's text.
fn is_recognised(tokenizer: &Tokenizer, token: &AddedToken, id: u32) -> bool {
    ids(tokenizer, &format!("a{}a", token.content)).is_ok_and(|ids| ids.contains(&id))
}

/// Pairs of a character and the private-use character that replaces it.
struct Disguise(Vec<(char, char)>);

impl Disguise {
    fn hide(&self, text: &str) -> String {
        let private = |c| self.0.iter().find(|(original, _)| *original == c).map_or(c, |(_, private)| *private);
        text.chars().map(private).collect()
    }

    fn reveal(&self, text: &str) -> String {
        let originals: BTreeMap<char, char> = self.0.iter().map(|(original, private)| (*private, *original)).collect();
        text.chars().map(|c| originals.get(&c).copied().unwrap_or(c)).collect()
    }
}

pub(crate) fn ids(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, ModelError> {
    let encoding = tokenizer.encode_fast(text, false).map_err(|error| ModelError::Tokenizer(error.to_string()))?;
    Ok(encoding.get_ids().to_vec())
}
