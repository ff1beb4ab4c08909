//! What a run's style model said, from the run's episodes.

use querl_core::ports::StyleModel;
use querl_core::records::{CallFailure, Episode, FailureKind, Message, StyleProbability};
use querl_style::text_of;
use querl_style::turns_of_side;
use std::collections::HashMap;
use std::sync::Arc;

/// A style model that says again what it said of the answers of a run, and nothing of others.
pub(super) struct RecordedStyles(HashMap<String, Vec<StyleProbability>>);

impl RecordedStyles {
    /// Of the answers of both sides; `None` where none has a style.
    pub(super) fn of<'a>(episodes: impl Iterator<Item = &'a Episode>) -> Option<Arc<Self>> {
        let mut said = HashMap::new();
        for episode in episodes {
            for side in [&episode.policy, &episode.baseline] {
                if let (Some(style), Ok(text)) = (&side.style, text_of(&turns_of_side(episode, side))) {
                    said.insert(text, style.clone());
                }
            }
        }
        (!said.is_empty()).then(|| Arc::new(Self(said)))
    }
}

impl StyleModel for RecordedStyles {
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        let message = "the episodes hold no style of this dialogue; a replay knows what the run asked alone";
        let unknown = || CallFailure { kind: FailureKind::NotRecorded, message: message.to_owned() };
        self.0.get(&text_of(turns)?).cloned().ok_or_else(unknown)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use querl_core::records::Candidate;
    use querl_style::turns_of;

    #[test]
    fn what_was_said_of_both_sides_is_said_again_and_of_others_nothing() {
        let side = |rewrite: &str, probability| {
            let style = Some(vec![StyleProbability { label: "诚实".into(), probability }]);
            Candidate { style, ..Candidate::found_nothing(rewrite.into()) }
        };
        let episode = Episode {
            id: "a".into(),
            query: "怎么洗".into(),
            context: Default::default(),
            gold_ids: Vec::new(),
            policy: side("冷水洗", 0.25),
            baseline: side("不确定", 1.0),
        };
        let styles = RecordedStyles::of([&episode].into_iter()).unwrap();
        let said = |rewrite: &str| styles.classify(&turns_of("怎么洗", rewrite)).map(|classes| classes[0].probability);
        assert_eq!((said("冷水洗"), said("不确定")), (Ok(0.25), Ok(1.0)));
        assert_eq!(said("热水洗").unwrap_err().kind, FailureKind::NotRecorded);
        let without = Episode { policy: Candidate::found_nothing("冷水洗".into()), ..episode.clone() };
        let without = Episode { baseline: without.policy.clone(), ..without };
        assert!(RecordedStyles::of([&without].into_iter()).is_none());
    }
}
