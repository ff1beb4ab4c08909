//! The style of what both sides wrote, where a run has a style model.

use crate::plugins::style::turns_of;
use querl_core::ports::StyleModel;
use querl_core::records::{Episode, Message, Rejection};

/// The code of an episode whose style the model gave no answer about.
const FAILED_CODE: &str = "style_model_failed";

/// Puts the distributions of both sides into episodes, of all that is not blank in one go. For each episode why it cannot be scored, where
/// the model failed.
pub(super) fn add(model: &dyn StyleModel, episodes: &mut [Episode]) -> Vec<Option<Rejection>> {
    let mut dialogues: Vec<Vec<Message>> = Vec::new();
    let mut places: Vec<[Option<usize>; 2]> = Vec::new();
    for episode in episodes.iter() {
        places.push([&episode.policy, &episode.baseline].map(|candidate| {
            let is_there = !candidate.rewrite.trim().is_empty();
            is_there.then(|| {
                dialogues.push(turns_of(&episode.query, &candidate.rewrite));
                dialogues.len() - 1
            })
        }));
    }
    let said = model.classify_all(&dialogues);
    let mut rejections = vec![None; episodes.len()];
    for ((episode, places), rejection) in episodes.iter_mut().zip(places).zip(&mut rejections) {
        for (candidate, place) in [&mut episode.policy, &mut episode.baseline].into_iter().zip(places) {
            match place.map(|place| &said[place]) {
                Some(Ok(style)) => candidate.style = Some(style.clone()),
                Some(Err(failure)) => {
                    *rejection = Some(Rejection { code: FAILED_CODE.into(), detail: failure.to_string() });
                }
                None => {}
            }
        }
    }
    rejections
}
