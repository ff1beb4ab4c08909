//! Reward plugins: the weighted sum of several, and the style distributions that they read.

use querl_core::ports::{PluginFault, RewardModel, StyleModel};
use querl_core::records::{Episode, Message, Rejection, Reward, RewardComponent};
use querl_style::turns_of_side;
use std::sync::Arc;

/// One reward plugin and its weight in the sum.
#[derive(Clone)]
pub(crate) struct WeightedReward {
    /// Prefix of the plugin's components in metrics, episodes and reports; unique in a run.
    pub label: String,
    pub model: Arc<dyn RewardModel>,
    pub weight: f64,
}

/// One score per episode, in order: the weighted sum of the plugins' totals.
///
/// Components keep the plugin's own values, unweighted; with several plugins their names are `LABEL/component`, next to each
/// plugin's `LABEL/total`. An episode that one plugin rejects is rejected, with that plugin's code.
pub(crate) fn score(
    rewards: &[WeightedReward],
    episodes: &[Episode],
) -> Result<Vec<Result<Reward, Rejection>>, PluginFault> {
    let mut sums: Vec<Result<Reward, Rejection>> =
        episodes.iter().map(|_| Ok(Reward { total: 0.0, components: Vec::new() })).collect();
    for reward in rewards {
        let scores = reward.model.score_batch(episodes)?;
        sums = sums.into_iter().zip(scores).map(|(sum, score)| add(sum, score, reward, rewards.len())).collect();
    }
    Ok(sums)
}

fn add(
    sum: Result<Reward, Rejection>,
    score: Result<Reward, Rejection>,
    reward: &WeightedReward,
    n_plugins: usize,
) -> Result<Reward, Rejection> {
    let mut sum = sum?;
    let name = &reward.label;
    let score =
        score.map_err(|rejection| Rejection { detail: format!("{name}: {}", rejection.detail), ..rejection })?;
    sum.total += reward.weight * score.total;
    if n_plugins == 1 {
        sum.components = score.components;
    } else {
        let named = score.components.into_iter();
        sum.components.extend(named.map(|part| RewardComponent { name: format!("{name}/{}", part.name), ..part }));
        sum.components.push(RewardComponent { name: format!("{name}/total"), value: score.total });
    }
    Ok(sum)
}

/// The code of episodes whose style classification failed.
const FAILED_CODE: &str = "style_model_failed";

/// Adds the style distributions of both sides, of all texts that are not blank in one call. Rejections of the episodes for which the model
/// failed.
pub(super) fn add_styles(model: &dyn StyleModel, episodes: &mut [Episode]) -> Vec<Option<Rejection>> {
    let mut dialogues: Vec<Vec<Message>> = Vec::new();
    let mut places: Vec<[Option<usize>; 2]> = Vec::new();
    for episode in episodes.iter() {
        places.push([&episode.policy, &episode.baseline].map(|candidate| {
            let is_there = !candidate.rewrite.trim().is_empty();
            is_there.then(|| {
                dialogues.push(turns_of_side(episode, candidate));
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::testing::{Shop, ShopReward, query, request, rewritten};
    use super::*;
    use querl_core::records::{CallFailure, Candidate, FailureKind, StyleProbability};
    use std::sync::Mutex;

    fn episode() -> Episode {
        let (shop, row) = (Shop::default(), query("a"));
        shop.scorer().score(&[request(&row, "good", rewritten("poor"))]).unwrap().scored.remove(0).episode
    }

    fn weighted(name: &'static str, weight: f64) -> WeightedReward {
        WeightedReward { label: name.into(), model: Arc::new(ShopReward(name)), weight }
    }

    #[test]
    fn one_plugin_keeps_its_component_names() {
        let reward = score(&[weighted("a", 2.0)], &[episode()]).unwrap().remove(0).unwrap();
        assert_eq!((reward.total, reward.components[0].name.as_str()), (1.4, "top1"));
    }

    #[test]
    fn several_plugins_are_summed_by_weight_and_named() {
        let rewards = [weighted("a", 1.0), weighted("b", 0.5)];
        let reward = score(&rewards, &[episode()]).unwrap().remove(0).unwrap();
        assert!((reward.total - 1.05).abs() < 1e-12, "{reward:?}");
        let names: Vec<_> = reward.components.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(names, ["a/top1", "a/total", "b/top1", "b/total"]);
    }

    /// Probability: the share of the first character in the text. Texts that begin with `x` fail. Records the classified texts.
    #[derive(Default)]
    struct ByFirst(Mutex<Vec<(String, String)>>);

    impl StyleModel for ByFirst {
        fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
            let [question, answer] = turns else { panic!("{turns:?}") };
            assert_eq!((question.role.as_str(), answer.role.as_str()), ("user", "assistant"));
            self.0.lock().unwrap().push((question.content.clone(), answer.content.clone()));
            let first = answer.content.chars().next().unwrap();
            if first == 'x' {
                return Err(CallFailure { kind: FailureKind::ServerError, message: "no such answer".into() });
            }
            let n_all = answer.content.chars().count() as f64;
            let probability = answer.content.chars().filter(|char| *char == first).count() as f64 / n_all;
            Ok(vec![StyleProbability { label: first.to_string(), probability }])
        }
    }

    fn episode_of(policy: &str, baseline: &str) -> Episode {
        let row = query("a");
        let request = request(&row, policy, rewritten(baseline));
        Episode {
            id: request.id.clone(),
            query: row.original_query.clone(),
            context: Default::default(),
            gold_ids: Vec::new(),
            policy: Candidate::found_nothing(policy.into()),
            baseline: Candidate::found_nothing(baseline.into()),
        }
    }

    fn style(candidate: &Candidate) -> Option<(String, f64)> {
        let [class] = candidate.style.as_ref()?.as_slice() else { panic!("{candidate:?}") };
        Some((class.label.clone(), class.probability))
    }

    /// Regression: an episode got the distribution of its other side, or of the first episode.
    #[test]
    fn each_side_of_each_episode_has_its_own_distribution() {
        let (model, mut episodes) =
            (ByFirst::default(), [episode_of("aa", "abbb"), episode_of("bc", "ddd"), episode_of("eff", "ggh")]);
        assert_eq!(add_styles(&model, &mut episodes), [None, None, None]);
        let found: Vec<_> = episodes.iter().map(|one| (style(&one.policy), style(&one.baseline))).collect();
        let of = |label: &str, probability| Some((label.to_owned(), probability));
        let thirds = 2.0 / 3.0;
        assert_eq!(found[0], (of("a", 1.0), of("a", 0.25)));
        assert_eq!(found[1], (of("b", 0.5), of("d", 1.0)));
        assert_eq!(found[2], (of("e", 1.0 / 3.0), of("g", thirds)));
        assert!(model.0.lock().unwrap().iter().all(|(question, _)| *question == episodes[0].query));
    }

    #[test]
    fn a_blank_side_is_not_classified() {
        let (model, mut episodes) = (ByFirst::default(), [episode_of(" \n", "bb"), episode_of("cc", "dd")]);
        assert_eq!(add_styles(&model, &mut episodes), [None, None]);
        assert_eq!((style(&episodes[0].policy), style(&episodes[0].baseline)), (None, Some(("b".into(), 1.0))));
        assert_eq!(style(&episodes[1].policy), Some(("c".into(), 1.0)));
        assert_eq!(model.0.lock().unwrap().len(), 3);
    }

    #[test]
    fn an_episode_with_a_failed_side_is_rejected_and_the_others_are_not() {
        let (model, mut episodes) =
            (ByFirst::default(), [episode_of("aa", "xb"), episode_of("cc", "dd"), episode_of("x", "ee")]);
        let rejections = add_styles(&model, &mut episodes);
        let codes: Vec<_> = rejections.iter().map(|one| one.as_ref().map(|one| one.code.as_str())).collect();
        assert_eq!(codes, [Some("style_model_failed"), None, Some("style_model_failed")]);
        assert!(rejections[0].as_ref().unwrap().detail.contains("no such answer"));
        assert_eq!(style(&episodes[0].policy), Some(("a".into(), 1.0)));
    }
}
