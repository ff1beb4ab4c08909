//! Encoding of episodes for `packed-rewards` of contract 0.2.

use super::convert::{known, other_failure};
use crate::packed::{Writer, list};
use querl_core::records::{
    CallFailure, CandidateRef, ColumnValue, EpisodeRef, FailureKind, FinishReason, Hit, Judgement, Message, Scalar,
    Split,
};

/// Encodes episodes as the argument of `score-packed`.
pub(super) fn batch(episodes: &[EpisodeRef<'_>]) -> Vec<u8> {
    list(episodes, episode)
}

fn episode(writer: &mut Writer, episode: &EpisodeRef<'_>) {
    writer.text(episode.id);
    writer.text(episode.group_id);
    writer.u32(episode.sample_index as usize);
    writer.option(episode.step, Writer::u64);
    writer.option(episode.split, |writer, split| {
        writer.u8(match split {
            Split::Train => 0,
            Split::Val => 1,
            Split::Test => 2,
        });
    });
    writer.text(episode.query);
    writer.option(known(&episode.context.user_profile), Writer::text);
    writer.option(known(&episode.context.history_summary), Writer::text);
    let gold_ids = Some(episode.gold_ids).filter(|ids| !ids.is_empty());
    writer.option(gold_ids, |writer, ids| writer.list(ids, |writer, id| writer.text(id)));
    writer.list(episode.columns, |writer, (name, value)| {
        writer.text(name);
        column_value(writer, value);
    });
    writer.option(episode.prompt, |writer, messages| writer.list(messages, message));
    writer.option(episode.response, Writer::text);
    candidate(writer, &episode.policy);
    writer.option(episode.baseline.as_ref(), candidate);
}

fn column_value(writer: &mut Writer, value: &ColumnValue) {
    match value {
        ColumnValue::Text(text) => scalar(writer, 0, |writer| writer.text(text)),
        ColumnValue::Number(number) => scalar(writer, 1, |writer| writer.f64(*number)),
        ColumnValue::Flag(flag) => scalar(writer, 2, |writer| writer.u8(u8::from(*flag))),
        ColumnValue::Items(items) => scalar(writer, 3, |writer| {
            writer.list(items, |writer, item| match item {
                Scalar::Text(text) => scalar(writer, 0, |writer| writer.text(text)),
                Scalar::Number(number) => scalar(writer, 1, |writer| writer.f64(*number)),
                Scalar::Flag(flag) => scalar(writer, 2, |writer| writer.u8(u8::from(*flag))),
            });
        }),
    }
}

/// A case of a variant and its value.
fn scalar(writer: &mut Writer, case: u8, value: impl FnOnce(&mut Writer)) {
    writer.u8(case);
    value(writer);
}

fn message(writer: &mut Writer, message: &Message) {
    writer.u8(match message.role.as_str() {
        "system" => 0,
        "assistant" => 2,
        _ => 1,
    });
    writer.text(&message.content);
}

fn candidate(writer: &mut Writer, candidate: &CandidateRef<'_>) {
    writer.option(known(candidate.rewrite), Writer::text);
    writer.option(candidate.retrieval, |writer, retrieval| match retrieval {
        Ok(hits) => scalar(writer, 0, |writer| writer.list(hits, hit)),
        Err(failure) => scalar(writer, 1, |writer| call_failure(writer, failure)),
    });
    match candidate.judgement {
        Judgement::NotSampled => writer.u8(0),
        Judgement::Scored { score, reason } => {
            writer.u8(1);
            writer.u8(0);
            writer.f64(*score);
            writer.text(reason);
        }
        Judgement::Failed(failure) => {
            writer.u8(1);
            writer.u8(1);
            call_failure(writer, failure);
        }
    }
    writer.option(candidate.style, |writer, classes| {
        writer.list(classes, |writer, class| {
            writer.text(&class.label);
            writer.f64(class.probability);
        });
    });
    let n_tokens = Some(candidate.n_tokens).filter(|n_tokens| *n_tokens > 0);
    writer.option(n_tokens, |writer, n_tokens| writer.u32(n_tokens as usize));
    writer.option(candidate.finish_reason, |writer, reason| match reason {
        FinishReason::Stop => writer.u8(0),
        FinishReason::Length => writer.u8(1),
        FinishReason::Other(name) => scalar(writer, 2, |writer| writer.text(name)),
    });
}

fn hit(writer: &mut Writer, hit: &Hit) {
    writer.option(known(&hit.id), Writer::text);
    writer.text(&hit.text);
    writer.f64(hit.reranker_score);
    writer.option(hit.retrieval_score, Writer::f64);
    writer.u32(hit.rank as usize);
}

fn call_failure(writer: &mut Writer, failure: &CallFailure) {
    match failure.kind {
        FailureKind::Timeout => writer.u8(0),
        FailureKind::Unreachable => writer.u8(1),
        FailureKind::Unauthorized => writer.u8(2),
        FailureKind::Rejected => writer.u8(3),
        FailureKind::RateLimited => writer.u8(4),
        FailureKind::ServerError => writer.u8(5),
        FailureKind::InvalidResponse => writer.u8(6),
        FailureKind::NotRecorded => writer.u8(7),
        kind @ (FailureKind::Down | FailureKind::OverBudget) => {
            scalar(writer, 8, |writer| writer.text(other_failure(kind)));
        }
    }
    writer.text(&failure.message);
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::records::Episode;

    #[test]
    fn batch_is_encoded_as_the_contract_says() {
        let json = r#"{"id": "a", "group_id": "g", "sample_index": 2, "step": 258, "split": "validation", "query": "鱼",
            "gold_ids": ["k"], "columns": {"n": [1.0, "x", true]}, "prompt": [{"role": "user", "content": "?"}],
            "response": "", "policy": {"rewrite": "r", "retrieval": {"hits": []}, "n_tokens": 3, "finish_reason": "stop"},
            "baseline": {"judgement": {"failed": {"kind": "timeout", "message": "late"}}}}"#;
        let episode: Episode = serde_json::from_str(json).unwrap();
        let text = |text: &str| [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
        let head = [&[1, 0, 0, 0][..], &text("a"), &text("g"), &[2, 0, 0, 0, 1, 2, 1, 0, 0, 0, 0, 0, 0, 1, 1]].concat();
        let query = [&text("鱼")[..], &[0, 0, 1, 1, 0, 0, 0], &text("k")].concat();
        let items = [&[3, 3, 0, 0, 0, 1][..], &1.0_f64.to_le_bytes(), &[0], &text("x"), &[2, 1]].concat();
        let columns = [&[1, 0, 0, 0][..], &text("n"), &items].concat();
        let prompt = [&[1, 1, 0, 0, 0, 1][..], &text("?"), &[1], &text("")].concat();
        let policy = [&[1][..], &text("r"), &[1, 0, 0, 0, 0, 0, 0, 0, 1, 3, 0, 0, 0, 1, 0]].concat();
        let baseline = [&[1, 0, 0, 1, 1, 0][..], &text("late"), &[0, 0, 0]].concat();
        assert_eq!(batch(&[(&episode).into()]), [head, query, columns, prompt, policy, baseline].concat());
    }
}
