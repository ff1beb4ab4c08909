//! Weighted sum of reward plugins, and the style distributions that reward plugins read.

use querl_core::ports::{EpisodeInputs, InputUse, PluginFault, RewardModel, StyleModel};
use querl_core::records::{Candidate, Episode, Message, Rejection, Reward, RewardComponent};
use querl_style::turns_of_side;
use std::sync::Arc;

#[derive(Clone)]
pub(crate) struct WeightedReward {
    /// Prefix of the plugin's components in metrics, episodes and reports; unique in a run.
    pub label: String,
    pub model: Arc<dyn RewardModel>,
    pub weight: f64,
}

pub(crate) type Outcome = Result<Reward, Rejection>;

/// Union of the episode inputs that the reward plugins read.
pub(crate) fn inputs(rewards: &[WeightedReward]) -> EpisodeInputs {
    rewards.iter().map(|reward| reward.model.inputs()).fold(EpisodeInputs::default(), EpisodeInputs::union)
}

/// Union of the inputs of the teacher's side that the reward plugins read: a plugin that declares the baseline reads its other declared
/// inputs of the teacher's rewrite too.
pub(crate) fn inputs_of_baseline(rewards: &[WeightedReward]) -> EpisodeInputs {
    let inputs = rewards.iter().map(|reward| reward.model.inputs().of_baseline());
    inputs.fold(EpisodeInputs::default(), EpisodeInputs::union)
}

pub(crate) struct RewardScores {
    /// Weighted sum of the rewards, one per episode, in order.
    pub sums: Vec<Outcome>,
    /// Results of each reward plugin, one list per plugin.
    pub by_reward: Vec<Vec<Outcome>>,
}

/// Scores episodes: the weighted sum of the plugins' totals, one per episode, in order.
///
/// Components keep the plugin's own values, unweighted; with several plugins their names are `LABEL/component`, next to each
/// plugin's `LABEL/total`. An episode that one plugin rejects is rejected, with that plugin's code.
pub(crate) fn score(rewards: &[WeightedReward], episodes: &[Episode]) -> Result<RewardScores, PluginFault> {
    let mut sums: Vec<Outcome> = episodes.iter().map(|_| Ok(Reward { total: 0.0, components: Vec::new() })).collect();
    let mut by_reward = Vec::with_capacity(rewards.len());
    for reward in rewards {
        let scores = reward.model.score_batch(episodes)?;
        sums = sums.into_iter().zip(&scores).map(|(sum, score)| add(sum, score, reward, rewards.len())).collect();
        by_reward.push(scores);
    }
    Ok(RewardScores { sums, by_reward })
}

fn add(sum: Outcome, score: &Outcome, reward: &WeightedReward, n_plugins: usize) -> Outcome {
    let mut sum = sum?;
    let name = &reward.label;
    let score = score
        .clone()
        .map_err(|rejection| Rejection { detail: format!("{name}: {}", rejection.detail), ..rejection })?;
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

/// Adds style distributions to the sides whose style is not unused, classifying all texts that are not blank in one call. Returns
/// rejections of the episodes for which the model failed and the distribution is required.
pub(super) fn add_styles(
    model: &dyn StyleModel,
    style: impl Fn(&str) -> InputUse,
    episodes: &mut [Episode],
) -> Vec<Option<Rejection>> {
    let is_classified = |(side, candidate): &(&str, &Candidate)| {
        style(side) != InputUse::Unused && !candidate.rewrite.trim().is_empty()
    };
    let mut dialogues: Vec<Vec<Message>> = Vec::new();
    let mut sides: Vec<(usize, &str)> = Vec::new();
    for (index, episode) in episodes.iter().enumerate() {
        for (side, candidate) in episode.candidates().filter(is_classified) {
            dialogues.push(turns_of_side(episode, candidate));
            sides.push((index, side));
        }
    }
    let mut rejections = vec![None; episodes.len()];
    for ((index, side), classified) in sides.into_iter().zip(model.classify_all(&dialogues)) {
        let episode = &mut episodes[index];
        let candidate = if side == "policy" { Some(&mut episode.policy) } else { episode.baseline.as_mut() };
        match (classified, candidate) {
            (Ok(style), Some(candidate)) => candidate.style = Some(style),
            (Err(failure), _) if style(side) == InputUse::Required => {
                rejections[index] = Some(Rejection::by_host(FAILED_CODE, failure.to_string()));
            }
            (Ok(_), None) | (Err(_), _) => {}
        }
    }
    rejections
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Shop, ShopReward, query, request, rewritten};
    use super::*;
    use querl_core::records::{CallFailure, FailureKind, StyleProbability};
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
        let reward = score(&[weighted("a", 2.0)], &[episode()]).unwrap().sums.remove(0).unwrap();
        assert_eq!((reward.total, reward.components[0].name.as_str()), (1.4, "top1"));
    }

    #[test]
    fn several_plugins_are_summed_by_weight_and_named() {
        let rewards = [weighted("a", 1.0), weighted("b", 0.5)];
        let reward = score(&rewards, &[episode()]).unwrap().sums.remove(0).unwrap();
        assert!((reward.total - 1.05).abs() < 1e-12, "{reward:?}");
        let names: Vec<_> = reward.components.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(names, ["a/top1", "a/total", "b/top1", "b/total"]);
    }

    /// A style model whose probability is the share of the first character in the text. Texts that begin with `x` fail. Records the
    /// classified texts.
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
        Episode {
            query: "query a".into(),
            policy: Candidate::found_nothing(policy.into()),
            baseline: Some(Candidate::found_nothing(baseline.into())),
            ..Episode::default()
        }
    }

    fn style(candidate: &Candidate) -> Option<(String, f64)> {
        let [class] = candidate.style.as_ref()?.as_slice() else { panic!("{candidate:?}") };
        Some((class.label.clone(), class.probability))
    }

    fn style_of_baseline(episode: &Episode) -> Option<(String, f64)> {
        style(episode.baseline.as_ref().unwrap())
    }

    /// Regression: an episode got the distribution of its other side, or of the first episode.
    #[test]
    fn each_side_of_each_episode_has_its_own_distribution() {
        let (model, mut episodes) =
            (ByFirst::default(), [episode_of("aa", "abbb"), episode_of("bc", "ddd"), episode_of("eff", "ggh")]);
        assert_eq!(add_styles(&model, |_| InputUse::Required, &mut episodes), [None, None, None]);
        let found: Vec<_> = episodes.iter().map(|one| (style(&one.policy), style_of_baseline(one))).collect();
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
        assert_eq!(add_styles(&model, |_| InputUse::Required, &mut episodes), [None, None]);
        assert_eq!((style(&episodes[0].policy), style_of_baseline(&episodes[0])), (None, Some(("b".into(), 1.0))));
        assert_eq!(style(&episodes[1].policy), Some(("c".into(), 1.0)));
        assert_eq!(model.0.lock().unwrap().len(), 3);
    }

    #[test]
    fn an_episode_with_a_failed_side_is_rejected_and_the_others_are_not() {
        let (model, mut episodes) =
            (ByFirst::default(), [episode_of("aa", "xb"), episode_of("cc", "dd"), episode_of("x", "ee")]);
        let rejections = add_styles(&model, |_| InputUse::Required, &mut episodes);
        let codes: Vec<_> = rejections.iter().map(|one| one.as_ref().map(|one| one.code.as_str())).collect();
        assert_eq!(codes, [Some("style_model_failed"), None, Some("style_model_failed")]);
        assert!(rejections[0].as_ref().unwrap().detail.contains("no such answer"));
        assert_eq!(style(&episodes[0].policy), Some(("a".into(), 1.0)));
        // A reward that does not require the distribution scores without it.
        let mut episodes = [episode_of("aa", "xb")];
        assert_eq!(add_styles(&model, |_| InputUse::Optional, &mut episodes), [None]);
        assert_eq!((style(&episodes[0].policy), style_of_baseline(&episodes[0])), (Some(("a".into(), 1.0)), None));
    }
}
