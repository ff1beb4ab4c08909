//! Loss of the base model on the tenant's texts, compared with a unigram model: a base that does not know the language produces noise, and
//! fine-tuning on a few hundred rows does not teach it the language.

use super::advice::{Advice, Level, percent};
use crate::stages::noise::equal_share;
use anyhow::Context;
use querl_core::config::{Config, RewriteForm};
use querl_core::edits::KEEP;
use querl_core::records::DatasetRow;
use querl_model::{Decoder, PackedBatch, Pass, TextTokenizer, Weights};
use serde::Serialize;
use std::collections::BTreeMap;

/// Maximum number of texts of one kind.
const MAX_TEXTS: usize = 64;
/// Maximum number of tokens of a passage.
const MAX_PASSAGE_TOKENS: usize = 256;
/// Nats per token above which a base model produces noise on these texts: a model that ended fine-tuning with 5.6 repeated a single
/// character.
const NOISE_NATS: f64 = 4.5;
/// Nats per token above which fine-tuning has much to learn.
const WEAK_NATS: f64 = 3.5;
/// A base model with a loss above this share of a unigram model's loss uses none of the context.
const UNIGRAM_SHARE: f64 = 0.9;
/// The same for a base model that uses little of the context: less than a quarter of what token frequencies leave open. Not measured.
const WEAK_UNIGRAM_SHARE: f64 = 0.75;

/// Loss on one kind of text (rewrites or passages), summed over tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct TextLoss {
    /// Number of texts.
    pub n_texts: usize,
    /// Number of predicted tokens.
    pub n_tokens: usize,
    /// Number of characters of the predicted tokens.
    pub n_chars: usize,
    /// Loss of the base model in nats.
    pub nats: f64,
    /// Loss of a unigram model of the same tokens in nats: see [`unigram_nats`].
    pub unigram_nats: f64,
}

impl TextLoss {
    /// Loss of the base model in nats per token.
    pub fn per_token(&self) -> f64 {
        self.nats / self.n_tokens.max(1) as f64
    }

    /// Loss of the base model in nats per character, which can be compared between tokenizers.
    pub fn per_char(&self) -> f64 {
        self.nats / self.n_chars.max(1) as f64
    }

    /// Loss of the unigram model in nats per token.
    pub fn unigram_per_token(&self) -> f64 {
        self.unigram_nats / self.n_tokens.max(1) as f64
    }

    /// Nats per token above which a base is [`Level::Weak`], and [`Level::Bad`]. If most texts are equal, the unigram model's loss is low
    /// and no limit.
    fn limits(&self, are_equal: bool) -> [f64; 2] {
        let unigram = if are_equal { f64::INFINITY } else { self.unigram_per_token() };
        [WEAK_NATS.min(WEAK_UNIGRAM_SHARE * unigram), NOISE_NATS.min(UNIGRAM_SHARE * unigram)]
    }

    fn level(&self, are_equal: bool) -> Level {
        let ([weak, bad], nats) = (self.limits(are_equal), self.per_token());
        match nats > bad {
            true => Level::Bad,
            false if nats > weak => Level::Weak,
            false => Level::Ok,
        }
    }
}

/// Loss of the base model on rewrites and on passages.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LossFacts {
    /// Loss on the target rewrites, given their prompts; `None` before the data stages.
    pub targets: Option<TextLoss>,
    /// Loss on passages; `None` if the passages are not known.
    pub passages: Option<TextLoss>,
    /// `data.rewrite_form`: whether the targets of SFT are edits of the query.
    pub rewrite_form: RewriteForm,
    /// The most frequent target of SFT and its share of all; `None` below a half.
    pub equal_targets: Option<(String, f64)>,
}

impl LossFacts {
    /// The loss as advice in words. The loss on the targets of SFT decides. If there are no rewrites yet, the loss on passages can be bad
    /// or weak, not ok: a base may have memorised the passages without being able to write a rewrite. Such a base may learn the form: it
    /// is weak, not bad. If most targets are equal, their share is the finding, and not the comparison with the unigram model.
    pub fn advice(&self) -> Advice {
        let are_equal = self.equal_targets.is_some();
        let of = |what: &str, loss: &TextLoss, are_equal: bool| {
            let [weak, bad] = loss.limits(are_equal);
            format!(
                "loss {:.2} nats per token of {what} ({:.2} per character; token frequencies alone give {:.2}; weak above {weak:.2}, bad above {bad:.2})",
                loss.per_token(),
                loss.per_char(),
                loss.unigram_per_token()
            )
        };
        let targets = self.targets.as_ref().map(|loss| of("rewrites", loss, are_equal));
        let passages = self.passages.as_ref().map(|loss| of("passages", loss, false));
        let form = match self.rewrite_form {
            RewriteForm::Full => "targets are full texts (data.rewrite_form = \"full\")",
            RewriteForm::Edit => "targets are edits of the query (data.rewrite_form = \"edit\")",
        };
        let finding: Vec<String> = targets.into_iter().chain(passages).chain([form.to_owned()]).collect();
        let equal = self.equal_targets.as_ref().map(|(target, share)| match target.as_str() {
            KEEP => format!(
                "{} of the targets are `=`: the policy will learn to keep the query, and little can be gained",
                percent(*share)
            ),
            _ => format!("{} of the targets are one text: the policy will learn to write it", percent(*share)),
        });
        let than = match &self.targets {
            Some(loss) if loss.per_token() > loss.unigram_per_token() => "worse than",
            _ => "hardly better than",
        };
        let undertrained = format!(
            "undertrained: it knows the passages, and predicts the rewrites {than} token frequencies do; pretrain it for more epochs on \
             conversations in the form of the prompt (`querl model corpus`, `querl model pretrain`), or take another base"
        );
        let targets = self.targets.as_ref().map(|loss| loss.level(are_equal));
        let passages = self.passages.as_ref().map(|loss| loss.level(false));
        let (level, action) = match (targets, passages, equal.as_deref()) {
            (None, None, _) => {
                let finding = format!("no rewrites and no passages are known yet; {form}");
                return Advice::new(
                    "base model",
                    Level::Unknown,
                    finding,
                    "run `querl run CONFIG --to convert`, then plan again",
                );
            }
            (Some(Level::Bad), Some(Level::Ok), _) => (Level::Weak, undertrained.as_str()),
            (Some(Level::Bad), _, _) | (None, Some(Level::Bad), _) => (
                Level::Bad,
                "the base model writes noise in this language: take another one, or pretrain one on these texts (`querl model pretrain`)",
            ),
            (Some(_), _, Some(equal)) => (Level::Weak, equal),
            (Some(Level::Weak), _, _) | (None, Some(Level::Weak), _) => (
                Level::Weak,
                "undertrained on these texts: pretrain it for more epochs (`querl model pretrain`), take another base, or fine-tune with more rows \
                 and epochs",
            ),
            (None, Some(_), _) => (
                Level::Unknown,
                "the base model knows the passages; whether it can write the rewrites is not known before the data stages: \
                 run `querl run CONFIG --to convert`, then plan again",
            ),
            (Some(level), _, _) => (level, "nothing to do: the base model knows these texts"),
        };
        Advice::new("base model", level, finding.join("; "), action)
    }
}

/// Loss in nats of a unigram model on the sequences that it is estimated from, by leave-one-out. Tokens that occur once share the
/// probability that the Witten-Bell estimate gives to new tokens.
///
/// Source: Witten and Bell 1991, "The zero-frequency problem", method C.
pub(super) fn unigram_nats(sequences: &[Vec<u32>], vocab_size: usize) -> f64 {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    sequences.iter().flatten().for_each(|id| *counts.entry(*id).or_default() += 1);
    let (n_tokens, n_types) = (counts.values().sum::<usize>(), counts.len());
    let of_token = |count: usize| {
        let rest = n_tokens.saturating_sub(1) as f64;
        if count > 1 {
            return ((count - 1) as f64 / (rest + n_types as f64)).ln();
        }
        let n_types = n_types.saturating_sub(1).max(1);
        let n_new = vocab_size.saturating_sub(n_types).max(1);
        (n_types as f64 / (rest + n_types as f64) / n_new as f64).ln()
    };
    -counts.values().map(|&count| count as f64 * of_token(count)).sum::<f64>()
}

/// One text as tokens; tokens before `first` are context without loss.
struct Sequence {
    ids: Vec<u32>,
    first: usize,
    n_chars: usize,
}

/// Computes the loss of the configured base on up to 64 rewrites and 64 passages, on the CPU.
///
/// # Errors
/// The model cannot be loaded, or a pass fails.
pub(super) fn base_loss(config: &Config, rows: &[DatasetRow], passages: &[&str]) -> anyhow::Result<LossFacts> {
    let model = &config.model;
    let tokenizer = TextTokenizer::for_policy(model)?;
    let decoder = Decoder::load_as(&model.path, Weights::Frozen, model.dtype)
        .with_context(|| format!("{}: the base model", model.path.display()))?;
    let n_positions = decoder.config().max_positions;
    let mut targets = Vec::new();
    for row in spread(rows, MAX_TEXTS, |row| row.target().is_some()) {
        let (prompt, text) = (tokenizer.encode_prompt(row.prompt())?, row.target().unwrap_or_default());
        let first = prompt.len();
        let ids: Vec<u32> = prompt.into_iter().chain(tokenizer.encode_response(text)?).collect();
        targets.push(Sequence { ids, first, n_chars: text.chars().count() });
    }
    let mut texts = Vec::new();
    for text in spread(passages, MAX_TEXTS, |_| true) {
        let mut ids = tokenizer.encode(text)?;
        ids.truncate(MAX_PASSAGE_TOKENS);
        let n_chars = match ids.split_first() {
            Some((_, rest)) => tokenizer.decode(rest)?.chars().count(),
            None => 0,
        };
        texts.push(Sequence { ids, first: 1, n_chars });
    }
    let loss = |sequences: Vec<Sequence>| -> anyhow::Result<Option<TextLoss>> {
        let fits = |sequence: &Sequence| (2..=n_positions).contains(&sequence.ids.len()) && sequence.first > 0;
        let sequences: Vec<Sequence> = sequences.into_iter().filter(fits).collect();
        if sequences.is_empty() { Ok(None) } else { text_loss(&decoder, &sequences).map(Some) }
    };
    let equal_targets = equal_share(rows.iter().filter_map(DatasetRow::target));
    Ok(LossFacts {
        targets: loss(targets)?,
        passages: loss(texts)?,
        rewrite_form: config.data.rewrite_form,
        equal_targets: equal_targets.map(|(target, share)| (target.to_owned(), share)),
    })
}

fn text_loss(decoder: &Decoder, sequences: &[Sequence]) -> anyhow::Result<TextLoss> {
    let mut total = TextLoss { n_texts: sequences.len(), ..TextLoss::default() };
    for Sequence { ids, first, n_chars } in sequences {
        let batch = PackedBatch::new([&ids[..ids.len() - 1]]);
        let rows: Vec<u32> = (first - 1..ids.len() - 1).map(|row| row as u32).collect();
        let hidden = decoder.hidden_at(&batch, &rows, &Pass::with(None))?;
        let logprobs = decoder.token_logprobs(&hidden, ids[*first..].to_vec(), 1.0, None)?.to_vec2::<f32>()?;
        total.nats -= logprobs.iter().map(|row| f64::from(row[0])).sum::<f64>();
        total.n_tokens += logprobs.len();
        total.n_chars += n_chars;
    }
    let predicted: Vec<Vec<u32>> = sequences.iter().map(|sequence| sequence.ids[sequence.first..].to_vec()).collect();
    total.unigram_nats = unigram_nats(&predicted, decoder.config().vocab_size);
    Ok(total)
}

/// At most `n` of the items for which `wanted` is true, evenly spaced.
pub(super) fn spread<T>(items: &[T], n: usize, wanted: impl Fn(&T) -> bool) -> Vec<&T> {
    let found: Vec<&T> = items.iter().filter(|item| wanted(item)).collect();
    let taken = n.min(found.len());
    (0..taken).map(|index| found[index * found.len() / taken]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2, 2, 2, 2 and 5: four of five tokens are predicted by 3 / (4 + 2), the single one by 1 / (4 + 1) over the 9 others.
    #[test]
    fn a_unigram_model_predicts_each_token_from_the_others() {
        let expected = -(4.0 * (3.0_f64 / 6.0).ln() + (1.0_f64 / 5.0 / 9.0).ln());
        let found = unigram_nats(&[vec![2, 2, 2], vec![2, 5]], 10);
        assert!((found - expected).abs() < 1e-12, "{found}");
        assert_eq!(unigram_nats(&[], 10), 0.0);
        assert!(unigram_nats(&[vec![3]], 10).is_finite());
    }

    #[test]
    fn items_are_spread_over_all() {
        let items: Vec<u32> = (0..10).collect();
        assert_eq!(spread(&items, 3, |_| true), [&0, &3, &6]);
        assert_eq!(spread(&items, 99, |item| *item > 7), [&8, &9]);
        assert!(spread(&items, 0, |_| true).is_empty() && spread(&[] as &[u32], 3, |_| true).is_empty());
    }

    fn loss(per_token: f64, unigram: f64) -> TextLoss {
        TextLoss { n_texts: 1, n_tokens: 10, n_chars: 20, nats: 10.0 * per_token, unigram_nats: 10.0 * unigram }
    }

    #[test]
    fn a_base_that_is_noise_is_reported() {
        let of = |targets, passages| {
            LossFacts { targets, passages, rewrite_form: RewriteForm::Full, equal_targets: None }.advice()
        };
        assert_eq!(of(Some(loss(5.6, 7.0)), Some(loss(5.2, 7.0))).level, Level::Bad);
        assert_eq!(of(None, Some(loss(3.0, 3.2))).level, Level::Bad, "no better than a unigram model");
        assert_eq!(of(None, Some(loss(4.0, 7.0))).level, Level::Weak);
        assert_eq!(of(None, None).level, Level::Unknown);
        // Regression: such a base was ok before the data stages and hardly better than token frequencies after them.
        let known = of(None, Some(loss(2.0, 7.0)));
        assert!(known.action.contains("the rewrites is not known before the data stages"), "{known:?}");
        let expected = "loss 2.00 nats per token of passages (1.00 per character; token frequencies alone give 7.00; weak above 3.50, bad above \
                        4.50); targets are full texts (data.rewrite_form = \"full\")";
        assert_eq!((known.level, known.finding.as_str()), (Level::Unknown, expected));
    }

    /// Regression: a base model that had memorised the passages was rated ok, whatever it wrote.
    #[test]
    fn the_loss_on_rewrites_decides_where_it_is_known() {
        let of = |targets, passages| {
            let (targets, passages) = (Some(targets), Some(passages));
            LossFacts { targets, passages, rewrite_form: RewriteForm::Edit, equal_targets: None }.advice()
        };
        let undertrained = of(loss(5.6, 7.0), loss(2.0, 7.0));
        assert!(undertrained.level == Level::Weak);
        assert!(undertrained.action.starts_with("undertrained: it knows the passages"));
        assert!(undertrained.finding.ends_with("; targets are edits of the query (data.rewrite_form = \"edit\")"));
        assert_eq!(of(loss(3.4, 4.0), loss(1.0, 7.0)).level, Level::Weak, "0.85 of the unigram model's loss");
        assert_eq!(of(loss(2.0, 7.0), loss(5.2, 7.0)).level, Level::Ok);
    }

    /// Regression: where 91 % of the targets kept the query, a base that was worse than token frequencies was called hardly better, and
    /// more pretraining was the advice.
    #[test]
    fn equal_targets_are_named_and_their_unigram_model_is_no_limit() {
        let of = |nats: f64, equal: Option<(&str, f64)>| {
            let equal_targets = equal.map(|(target, share)| (target.to_owned(), share));
            let (targets, passages) = (Some(loss(nats, 0.6)), Some(loss(2.0, 7.0)));
            LossFacts { targets, passages, rewrite_form: RewriteForm::Edit, equal_targets }.advice()
        };
        let keep = of(0.9, Some((KEEP, 0.91)));
        let expected = "91 % of the targets are `=`: the policy will learn to keep the query, and little can be gained";
        assert_eq!((keep.level, keep.action.as_str()), (Level::Weak, expected));
        assert!(
            keep.finding.contains("token frequencies alone give 0.60; weak above 3.50, bad above 4.50"),
            "{keep:?}"
        );
        assert!(of(0.9, Some(("a", 0.5))).action.starts_with("50 % of the targets are one text"));
        assert!(of(5.0, Some((KEEP, 0.91))).action.starts_with("undertrained"), "a base that is noise");
        assert!(of(0.9, None).action.contains("predicts the rewrites worse than token frequencies do"));
        assert!(of(0.58, None).action.contains("predicts the rewrites hardly better than token frequencies do"));
    }
}
