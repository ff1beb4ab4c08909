//! Encoding of episodes for `packed-rewards` of contract 0.1.

use crate::packed::{Writer, list};
use querl_core::records::{CallFailure, CandidateRef, EpisodeRef, FailureKind, FinishReason, Hit, Judgement};

/// Encodes episodes, each with its baseline, as the argument of `score-packed`.
pub(super) fn batch(episodes: &[EpisodeRef<'_>]) -> Vec<u8> {
    list(episodes, episode)
}

fn episode(writer: &mut Writer, episode: &EpisodeRef<'_>) {
    writer.text(episode.id);
    writer.text(episode.query);
    writer.text(&episode.context.user_profile);
    writer.text(&episode.context.history_summary);
    writer.list(episode.gold_ids, |writer, id| writer.text(id));
    candidate(writer, &episode.policy);
    if let Some(baseline) = &episode.baseline {
        candidate(writer, baseline);
    }
}

fn candidate(writer: &mut Writer, candidate: &CandidateRef<'_>) {
    writer.text(candidate.rewrite);
    match candidate.retrieval {
        Some(Err(failure)) => {
            writer.u8(1);
            call_failure(writer, failure);
        }
        found => {
            writer.u8(0);
            writer.list(found.and_then(Result::ok).unwrap_or_default(), hit);
        }
    }
    match candidate.judgement {
        Judgement::Scored { score, reason } => {
            writer.u8(0);
            writer.f64(*score);
            writer.text(reason);
        }
        Judgement::NotSampled => writer.u8(1),
        Judgement::Failed(failure) => {
            writer.u8(2);
            call_failure(writer, failure);
        }
    }
    writer.option(candidate.style, |writer, classes| {
        writer.list(classes, |writer, class| {
            writer.text(&class.label);
            writer.f64(class.probability);
        });
    });
    writer.u32(candidate.n_tokens as usize);
    writer.u8(u8::from(candidate.finish_reason == Some(&FinishReason::Length)));
}

fn hit(writer: &mut Writer, hit: &Hit) {
    writer.text(&hit.id);
    writer.text(&hit.text);
    writer.f64(hit.reranker_score);
    writer.option(hit.retrieval_score, Writer::f64);
    writer.u32(hit.rank as usize);
}

fn call_failure(writer: &mut Writer, failure: &CallFailure) {
    writer.u8(match failure.kind {
        FailureKind::Timeout => 0,
        FailureKind::Unreachable | FailureKind::Down | FailureKind::OverBudget => 1,
        FailureKind::Unauthorized => 2,
        FailureKind::Rejected => 3,
        FailureKind::RateLimited => 4,
        FailureKind::ServerError => 5,
        FailureKind::InvalidResponse => 6,
        FailureKind::NotRecorded => 7,
    });
    writer.text(&failure.message);
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::records::Episode;

    #[test]
    fn first_bytes_of_a_batch_are_those_of_the_contract() {
        let json = r#"{"id": "a", "query": "鱼", "policy": {"rewrite": "", "retrieval": {"hits": []}},
            "baseline": {"rewrite": "", "retrieval": {"failed": {"kind": "timeout", "message": "late"}}}}"#;
        let episode: Episode = serde_json::from_str(json).unwrap();
        let bytes = batch(&[(&episode).into()]);
        let start = [&[1, 0, 0, 0, 1, 0, 0, 0][..], b"a", &[3, 0, 0, 0], "鱼".as_bytes(), &[0; 4 + 4 + 4]].concat();
        assert_eq!(bytes[..start.len()], start);
        let policy = [&[0; 4 + 1 + 4][..], &[1, 0], &[0; 4], &[0]].concat();
        assert_eq!(bytes[start.len()..][..policy.len()], policy);
        let baseline = [&[0; 4][..], &[1, 0, 4, 0, 0, 0], b"late", &[1, 0], &[0; 4], &[0]].concat();
        assert_eq!(bytes[start.len() + policy.len()..], baseline);
    }
}
