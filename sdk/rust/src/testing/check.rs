//! The rules of the contract for values that host and plugin exchange, as the host checks them.

use crate::{Dialogue, Episode, Hit, Message, Rejection, Role, Score, StyleProbability, Verdict};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// `Ok` for a valid value; the error is a sentence with the expected and the actual value.
pub(super) type Checked = Result<(), String>;

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(otherwise()) }
}

/// Panics if a value that a test passes to a plugin breaks the contract: the host never sends such a value.
#[track_caller]
pub(super) fn sent(checked: Checked) {
    if let Err(message) = checked {
        panic!("the host never sends this: {message}");
    }
}

/// Panics if a plugin's result breaks the contract: the host reports a fault.
#[track_caller]
pub(super) fn returned(checked: Checked) {
    if let Err(message) = checked {
        panic!("the host refuses this: {message}");
    }
}

pub(super) fn hits(hits: &[Hit]) -> Checked {
    for (index, hit) in hits.iter().enumerate() {
        let (number, score) = (index + 1, hit.reranker_score);
        ensure((0.0..=1.0).contains(&score), || {
            format!("hit {number} has the reranker score {score}; expected 0 to 1")
        })?;
        ensure(hit.rank as usize == number, || format!("hit {number} has the rank {}; expected {number}", hit.rank))?;
    }
    Ok(())
}

pub(super) fn judge_score(score: f64) -> Checked {
    ensure((0.0..=5.0).contains(&score), || format!("the judge's score is {score}; expected 0 to 5"))
}

pub(super) fn style(classes: &[StyleProbability]) -> Checked {
    let sum: f64 = classes.iter().map(|class| class.probability).sum();
    let all_in_range = classes.iter().all(|class| (0.0..=1.0).contains(&class.probability));
    ensure(all_in_range && (sum - 1.0).abs() <= 1e-6, || {
        format!("the style distribution sums to {sum}; expected probabilities of 0 to 1 that sum to 1")
    })
}

pub(super) fn episode(episode: &Episode) -> Checked {
    let baseline = episode.baseline.iter().map(|candidate| ("baseline", candidate));
    for (side, candidate) in std::iter::once(("policy", &episode.policy)).chain(baseline) {
        let on_side = |message: String| format!("{side}: {message}");
        ensure(candidate.rewrite.as_ref().is_none_or(|rewrite| !rewrite.trim().is_empty()), || {
            format!("{side}: the rewrite is blank; expected none")
        })?;
        if let Some(Ok(found)) = &candidate.retrieval {
            hits(found).map_err(on_side)?;
        }
        if let Some(Ok(judged)) = &candidate.judgement {
            judge_score(judged.score).map_err(on_side)?;
        }
        candidate.style.as_deref().map_or(Ok(()), style).map_err(on_side)?;
    }
    Ok(())
}

pub(super) fn dialogue(dialogue: &Dialogue) -> Checked {
    let last = dialogue.turns.last().map(|turn| turn.role);
    ensure(last == Some(Role::Assistant), || "the last turn of the dialogue is not the assistant's".into())
}

pub(super) fn range(range: &RangeInclusive<f64>) -> Checked {
    let (min, max) = (*range.start(), *range.end());
    ensure(min < max && min.abs() <= 1e9 && max.abs() <= 1e9, || {
        format!(
            "declares the range {min} to {max}; expected two numbers of at most 1e9 in magnitude, the first below the second"
        )
    })
}

pub(super) fn score(score: &Score, range: &RangeInclusive<f64>) -> Checked {
    ensure(range.contains(&score.total), || {
        let (min, max) = (range.start(), range.end());
        format!("total is {}; expected a number within the declared range {min} to {max}", score.total)
    })?;
    let n_parts = score.components.len();
    ensure(n_parts <= 64, || format!("the score has {n_parts} components; expected at most 64"))?;
    let mut names = BTreeSet::new();
    for part in &score.components {
        let name = &part.name;
        ensure(is_code(name), || format!("component name is `{name}`; expected 1 to 64 of a to z, 0 to 9 and _"))?;
        ensure(names.insert(name), || format!("component `{name}` appears twice"))?;
        ensure(part.value.abs() <= 1e18, || {
            format!("component `{name}` is {}; expected a finite number of at most 1e18 in magnitude", part.value)
        })?;
    }
    Ok(())
}

pub(super) fn rejection(rejection: &Rejection) -> Checked {
    ensure(is_code(&rejection.code), || {
        format!("rejected with the code `{}`; expected 1 to 64 of a to z, 0 to 9 and _", rejection.code)
    })
}

pub(super) fn scored(result: &Result<Score, Rejection>, range: &RangeInclusive<f64>) -> Checked {
    match result {
        Ok(given) => score(given, range),
        Err(refused) => rejection(refused),
    }
}

pub(super) fn verdict(verdict: &Verdict) -> Checked {
    match verdict {
        Verdict::Keep => Ok(()),
        Verdict::Drop(reason) => rejection(reason),
    }
}

pub(super) fn messages(messages: &[Message]) -> Checked {
    let last = messages.last().map(|message| message.role);
    ensure(last == Some(Role::User), || "the last message is not the user's, or there is none".into())?;
    ensure(messages.iter().skip(1).all(|message| message.role != Role::System), || {
        "a system message stands after another message; expected it at the start only".into()
    })
}

/// Whether `text` is a valid code or component name.
fn is_code(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.chars().all(|c| matches!(c, 'a'..='z' | '0'..='9' | '_'))
}
