//! Calls plugins in tests as the host calls them.

use super::check;
use crate::{
    Dialogue, Episode, Filter, GroupReward, Input, Inputs, JudgeScore, Message, Prompt, PromptInput, PromptTask,
    Rejection, Reward, Sample, Score, SettingError, Settings, StyleModel, StyleScorer, Verdict,
};
use std::fmt::Debug;
use std::ops::RangeInclusive;

/// Constructs a new plugin for each call, as the host makes a new instance for each call.
struct Configured<T> {
    settings: Settings,
    make: fn(&Settings) -> Result<T, SettingError>,
}

impl<T> Configured<T> {
    /// Panics if the plugin refuses the settings, or does not read one of them.
    #[track_caller]
    fn new(settings: Settings, make: fn(&Settings) -> Result<T, SettingError>) -> Self {
        if let Some(error) = make(&settings).err().or_else(|| settings.not_text()) {
            panic!("the plugin refuses its settings: {error}");
        }
        if let Some(key) = settings.unread().first() {
            let known = Settings::recorded(|settings| _ = make(settings));
            let known: Vec<String> = known.iter().map(|setting| format!("`{}`", setting.key)).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            panic!("the plugin knows no setting `{key}`: its `new` reads {known}");
        }
        Self { settings, make }
    }

    #[track_caller]
    fn plugin(&self) -> T {
        (self.make)(&self.settings)
            .unwrap_or_else(|error| panic!("the plugin refuses settings that it took before: {error}"))
    }
}

#[track_caller]
fn assert_same<R: PartialEq + Debug>(first: &R, second: &R, what: &str) {
    assert!(first == second, "{what}: expected {first:?}, got {second:?}");
}

/// A reward under test; made by [`reward`].
pub struct RewardTest<T> {
    configured: Configured<T>,
    range: RangeInclusive<f64>,
}

/// Configures a reward as the host does.
///
/// # Panics
/// The reward refuses the settings, does not read one of them, or declares an invalid range.
#[track_caller]
pub fn reward<T: Reward>(settings: Settings) -> RewardTest<T> {
    let configured = Configured::new(settings, T::new);
    let range = configured.plugin().range();
    check::returned(check::range(&range));
    RewardTest { configured, range }
}

impl<T: Reward> RewardTest<T> {
    /// Lowest and highest total that the reward declares.
    pub fn range(&self) -> RangeInclusive<f64> {
        self.range.clone()
    }

    /// Scores one episode.
    ///
    /// # Errors
    /// The plugin's rejection.
    ///
    /// # Panics
    /// The host never sends such an episode, or refuses the result; or the plugin scores the same episode differently the second time.
    #[track_caller]
    pub fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        let episode = declared(episode, T::INPUTS);
        let plugin = self.configured.plugin();
        let result = plugin.score(&episode);
        check::returned(check::scored(&result, &self.range));
        assert_same(&result, &plugin.score(&episode), "the same episode scored again");
        result
    }

    /// Scores a batch with one plugin, in order.
    ///
    /// # Panics
    /// As [`RewardTest::score`], and if an episode's result depends on other episodes of the batch.
    #[track_caller]
    pub fn score_batch(&self, episodes: impl IntoIterator<Item = impl Into<Episode>>) -> Vec<Result<Score, Rejection>> {
        let episodes: Vec<Episode> = episodes.into_iter().map(|episode| declared(&episode.into(), T::INPUTS)).collect();
        let plugin = self.configured.plugin();
        let together: Vec<_> = episodes.iter().map(|episode| plugin.score(episode)).collect();
        for (episode, result) in episodes.iter().zip(&together) {
            assert_same(&self.score(episode), result, "an episode scored in a batch, after it was alone");
        }
        together
    }
}

/// The checked episode without undeclared inputs, as the host sends it.
#[track_caller]
fn declared(episode: &Episode, inputs: Inputs) -> Episode {
    check::sent(check::episode(episode));
    let mut episode = episode.clone();
    strip(&mut episode, inputs);
    episode
}

/// Removes the inputs that a plugin does not declare from an episode, as the host does.
pub(crate) fn strip(episode: &mut Episode, inputs: Inputs) {
    let has = |input| inputs.contains(input);
    episode.response = episode.response.take().filter(|_| has(Input::Response));
    episode.prompt = episode.prompt.take().filter(|_| has(Input::Prompt));
    episode.baseline = episode.baseline.take().filter(|_| has(Input::Baseline));
    episode.columns.retain(|_| has(Input::Columns));
    for candidate in std::iter::once(&mut episode.policy).chain(&mut episode.baseline) {
        candidate.retrieval = candidate.retrieval.take().filter(|_| has(Input::Retrieval));
        candidate.judgement = candidate.judgement.take().filter(|_| has(Input::Judgement));
        candidate.style = candidate.style.take().filter(|_| has(Input::Style));
    }
}

/// A group reward under test; made by [`group_reward`].
pub struct GroupRewardTest<T> {
    configured: Configured<T>,
    range: RangeInclusive<f64>,
}

/// Configures a group reward as the host does.
///
/// # Panics
/// As [`reward`].
#[track_caller]
pub fn group_reward<T: GroupReward>(settings: Settings) -> GroupRewardTest<T> {
    let configured = Configured::new(settings, T::new);
    let range = configured.plugin().range();
    check::returned(check::range(&range));
    GroupRewardTest { configured, range }
}

impl<T: GroupReward> GroupRewardTest<T> {
    /// Lowest and highest total that the group reward declares.
    pub fn range(&self) -> RangeInclusive<f64> {
        self.range.clone()
    }

    /// Scores one group: all episodes get the `group_id` of the first.
    ///
    /// # Panics
    /// The host never sends such an episode, or refuses a result; or the results depend on the order of the group.
    #[track_caller]
    pub fn score(&self, episodes: impl IntoIterator<Item = impl Into<Episode>>) -> Vec<Result<Score, Rejection>> {
        let mut group: Vec<Episode> =
            episodes.into_iter().map(|episode| declared(&episode.into(), T::INPUTS)).collect();
        let id = group.first().map(|first| first.group_id.clone());
        let id = id.unwrap_or_else(|| panic!("the host never sends this: a group without episodes"));
        group.iter_mut().for_each(|episode| episode.group_id.clone_from(&id));
        let results = self.configured.plugin().score_group(&group);
        assert!(
            results.len() == group.len(),
            "the host refuses this: {} results for {} episodes",
            results.len(),
            group.len()
        );
        results.iter().for_each(|result| check::returned(check::scored(result, &self.range)));
        group.reverse();
        let mut reversed = self.configured.plugin().score_group(&group);
        reversed.reverse();
        assert_same(&results, &reversed, "the same group in the opposite order");
        results
    }
}

/// A filter under test; made by [`filter`].
pub struct FilterTest<T> {
    configured: Configured<T>,
}

/// Configures a filter as the host does.
///
/// # Panics
/// The filter refuses the settings, or does not read one of them.
#[track_caller]
pub fn filter<T: Filter>(settings: Settings) -> FilterTest<T> {
    FilterTest { configured: Configured::new(settings, T::new) }
}

impl<T: Filter> FilterTest<T> {
    /// Checks one batch: one verdict per sample, in order. Each batch gets a new filter.
    ///
    /// # Panics
    /// The host never sends such samples, or refuses a verdict; or the same batch gets other verdicts the second time.
    #[track_caller]
    pub fn check(&self, samples: impl IntoIterator<Item = impl Into<Sample>>) -> Vec<Verdict> {
        let mut samples: Vec<Sample> = samples.into_iter().map(Into::into).collect();
        samples.iter_mut().for_each(|sample| sample.columns.retain(|_| T::INPUTS.contains(Input::Columns)));
        samples.iter().for_each(|sample| check::sent(check::hits(&sample.hits)));
        let once = || -> Vec<Verdict> {
            let mut plugin = self.configured.plugin();
            samples.iter().map(|sample| plugin.check(sample)).collect()
        };
        let verdicts = once();
        verdicts.iter().for_each(|verdict| check::returned(check::verdict(verdict)));
        assert_same(&verdicts, &once(), "the same batch checked again");
        verdicts
    }
}

/// A tenant's prompts under test; made by [`prompt`].
pub struct PromptTest<T> {
    configured: Configured<T>,
}

/// Configures a prompt plugin as the host does.
///
/// # Panics
/// The plugin refuses the settings, or does not read one of them.
#[track_caller]
pub fn prompt<T: Prompt>(settings: Settings) -> PromptTest<T> {
    PromptTest { configured: Configured::new(settings, T::new) }
}

impl<T: Prompt> PromptTest<T> {
    /// The messages of the prompt for one task.
    ///
    /// # Errors
    /// The plugin's rejection.
    ///
    /// # Panics
    /// The host refuses the messages; or the input has no rewrite for the judge's task, or a rewrite for another task.
    #[track_caller]
    pub fn messages(&self, task: PromptTask, input: &PromptInput) -> Result<Vec<Message>, Rejection> {
        let is_judge = task == PromptTask::Judge;
        assert!(
            input.rewrite.is_some() == is_judge,
            "the host sends a rewrite with the judge's task and with no other"
        );
        let messages = self.configured.plugin().messages(task, input);
        check::returned(match &messages {
            Ok(messages) => check::messages(messages),
            Err(rejection) => check::rejection(rejection),
        });
        messages
    }

    /// Parses the rewrite in a model's response.
    ///
    /// # Errors
    /// The plugin's rejection.
    ///
    /// # Panics
    /// The rewrite is blank, or the rejection's code is invalid.
    #[track_caller]
    pub fn parse_rewrite(&self, text: &str) -> Result<String, Rejection> {
        let parsed = self.configured.plugin().parse_rewrite(text);
        match &parsed {
            Ok(rewrite) => assert!(!rewrite.trim().is_empty(), "the host refuses this: the parsed rewrite is blank"),
            Err(rejection) => check::returned(check::rejection(rejection)),
        }
        parsed
    }

    /// Parses the judgement in a judge's response.
    ///
    /// # Errors
    /// The plugin's rejection.
    ///
    /// # Panics
    /// The score is not within 0 to 5, or the rejection's code is invalid.
    #[track_caller]
    pub fn parse_judgement(&self, text: &str) -> Result<JudgeScore, Rejection> {
        let parsed = self.configured.plugin().parse_judgement(text);
        check::returned(match &parsed {
            Ok(judged) => check::judge_score(judged.score),
            Err(rejection) => check::rejection(rejection),
        });
        parsed
    }
}

/// A style scorer under test; made by [`style_scorer`].
pub struct StyleScorerTest<T> {
    configured: Configured<T>,
}

/// Configures a style scorer as the host does.
///
/// # Panics
/// The scorer refuses the settings, or does not read one of them.
#[track_caller]
pub fn style_scorer<T: StyleScorer>(settings: Settings) -> StyleScorerTest<T> {
    StyleScorerTest { configured: Configured::new(settings, T::new) }
}

impl<T: StyleScorer> StyleScorerTest<T> {
    /// Scores one dialogue; `model` is used as the run's style model.
    ///
    /// # Errors
    /// The plugin's rejection.
    ///
    /// # Panics
    /// The host never sends such a dialogue, or refuses the result; or the plugin scores it differently the second time.
    #[track_caller]
    pub fn score(&self, dialogue: &Dialogue, model: &dyn StyleModel) -> Result<Score, Rejection> {
        check::sent(check::dialogue(dialogue));
        let plugin = self.configured.plugin();
        let result = plugin.score(dialogue, model);
        check::returned(check::scored(&result, &(0.0..=1.0)));
        assert_same(&result, &plugin.score(dialogue, model), "the same dialogue scored again");
        result
    }
}

/// Asserts that two numbers differ by at most `tolerance`.
///
/// # Panics
/// They differ by more, or one is not finite.
#[track_caller]
pub fn assert_close(actual: f64, expected: f64, tolerance: f64) {
    let difference = (actual - expected).abs();
    assert!(difference <= tolerance, "expected {expected} within {tolerance:e}, got {actual}");
}
