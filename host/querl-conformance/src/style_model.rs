//! Stand-ins for a style model. Their labels are those of a real one; their probabilities mean nothing.

use querl_core::fsx::digest_hex;
use querl_core::ports::StyleModel;
use querl_core::records::{CallFailure, FailureKind, Message, StyleProbability};

const LABELS: [&str; 5] = ["售前", "售后", "投诉", "闲聊", "其他"];

/// Stands in for a style model: a distribution made of a digest of the dialogue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StandIn;

impl StyleModel for StandIn {
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        let text: Vec<_> = turns.iter().map(|turn| format!("{}\0{}", turn.role, turn.content)).collect();
        let weights = &digest_hex(text.join("\0").as_bytes()).into_bytes()[..LABELS.len()];
        let sum: u32 = weights.iter().map(|weight| u32::from(*weight)).sum();
        let class = |(label, weight): (&str, &u8)| StyleProbability {
            label: label.into(),
            probability: f64::from(*weight) / f64::from(sum),
        };
        Ok(LABELS.into_iter().zip(weights).map(class).collect())
    }
}

/// Stands in for a style model that gives no answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failing;

impl StyleModel for Failing {
    fn classify(&self, _: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        Err(CallFailure { kind: FailureKind::Timeout, message: "风格模型没有在30秒内回答".into() })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_stand_in_gives_distributions_that_differ_between_dialogues_and_repeat() {
        let dialogue = |text: &str| [Message { role: "assistant".into(), content: text.into() }];
        let one = StandIn.classify(&dialogue("在的")).unwrap();
        assert_eq!(one, StandIn.classify(&dialogue("在的")).unwrap());
        assert_ne!(one, StandIn.classify(&dialogue("亲，在的")).unwrap());
        assert!((one.iter().map(|class| class.probability).sum::<f64>() - 1.0).abs() < 1e-9);
    }
}
