//! Builders of episodes, samples, prompt inputs and dialogues for tests.

use super::check;
use crate::host::CallError;
use crate::{
    CallFailure, Candidate, Column, ColumnValue, Context, Dialogue, Episode, FailureKind, FinishReason, Hit,
    JudgeScore, Message, PromptInput, Sample, StyleModel, StyleProbability,
};
use std::ops::Deref;

/// Implements `Deref` and `From` for a builder and its record, and the groups of methods that several builders share (`id`, `context`).
macro_rules! builder {
    ($builder:ty, $record:ty, $field:tt, $($word:ident)+) => {
        impl Deref for $builder {
            type Target = $record;

            fn deref(&self) -> &$record {
                &self.$field
            }
        }

        impl From<$builder> for $record {
            fn from(builder: $builder) -> Self {
                builder.$field
            }
        }

        impl $builder {
            $(builder!($word $field);)+
        }
    };
    (id $field:tt) => {
        /// Sets the id, which is `test` by default.
        pub fn id(mut self, id: impl Into<String>) -> Self {
            self.$field.id = id.into();
            self
        }
    };
    (context $field:tt) => {
        /// Sets the user's profile (用户画像).
        pub fn profile(mut self, profile: impl Into<String>) -> Self {
            self.$field.context.user_profile = Some(profile.into());
            self
        }

        /// Sets the summary of the conversation so far (历史摘要).
        pub fn history(mut self, history: impl Into<String>) -> Self {
            self.$field.context.history_summary = Some(history.into());
            self
        }
    };
}

builder!(EpisodeBuilder, Episode, episode, id context);
builder!(SampleBuilder, Sample, 0, id context);
builder!(PromptInputBuilder, PromptInput, 0, context);
builder!(DialogueBuilder, Dialogue, 0, id);

/// Builder of an [`Episode`], which it dereferences to.
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub struct EpisodeBuilder {
    episode: Episode,
    side: Option<Side>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Policy,
    Baseline,
}

/// Builds an episode for `query`, with all other fields empty.
///
/// Calls after [`EpisodeBuilder::policy`] are about the policy's rewrite, calls after [`EpisodeBuilder::baseline`] about the teacher's:
///
/// ```
/// use querl_sdk::testing;
///
/// let episode = testing::episode("一天几粒啊")
///     .history("用户问过深海鱼油")
///     .policy("深海鱼油 每日用量").hit("kb-7", 0.8).hit("kb-2", 0.5).judged(4.5)
///     .baseline("鱼油 几粒").hit("kb-2", 0.5).judged(3.0);
/// assert_eq!(episode.policy.hits("policy").unwrap()[1].rank, 2);
/// ```
pub fn episode(query: impl Into<String>) -> EpisodeBuilder {
    let episode = Episode { id: "test".into(), group_id: "test".into(), query: query.into(), ..Episode::default() };
    EpisodeBuilder { episode, side: None }
}

impl EpisodeBuilder {
    /// Sets the ids of the passages known to answer the query.
    pub fn gold<T: Into<String>>(mut self, ids: impl IntoIterator<Item = T>) -> Self {
        self.episode.gold_ids = Some(ids.into_iter().map(Into::into).collect());
        self
    }

    /// Sets the group and the index of the sample in it, which are `test` and 0 by default.
    pub fn group(mut self, id: impl Into<String>, sample_index: u32) -> Self {
        (self.episode.group_id, self.episode.sample_index) = (id.into(), sample_index);
        self
    }

    /// Adds a column of the query's row.
    pub fn column(mut self, name: impl Into<String>, value: ColumnValue) -> Self {
        self.episode.columns.push(Column { name: name.into(), value });
        self
    }

    /// Sets the messages that the policy answered.
    pub fn prompt(mut self, messages: impl IntoIterator<Item = Message>) -> Self {
        self.episode.prompt = Some(messages.into_iter().collect());
        self
    }

    /// Sets the text that the policy generated.
    pub fn response(mut self, response: impl Into<String>) -> Self {
        self.episode.response = Some(response.into());
        self
    }

    /// Sets the policy's rewrite; calls after this one, such as [`EpisodeBuilder::hit`], are about the policy.
    pub fn policy(self, rewrite: impl Into<String>) -> Self {
        self.side(Side::Policy, rewrite.into())
    }

    /// Sets the teacher's rewrite; calls after this one, such as [`EpisodeBuilder::hit`], are about the teacher.
    pub fn baseline(self, rewrite: impl Into<String>) -> Self {
        self.side(Side::Baseline, rewrite.into())
    }

    /// Adds a hit of the current rewrite (policy or teacher), ranked below those before it. `reranker_score` is 0 to 1 and not
    /// above that of the hit before.
    #[track_caller]
    pub fn hit(self, id: impl Into<String>, reranker_score: f64) -> Self {
        self.hit_with_text(id, "", reranker_score)
    }

    /// Like [`EpisodeBuilder::hit`], with the text of the passage.
    #[track_caller]
    pub fn hit_with_text(self, id: impl Into<String>, text: impl Into<String>, reranker_score: f64) -> Self {
        let hit = Hit { id: Some(id.into()), text: text.into(), reranker_score, ..Hit::default() };
        self.about("hit", |candidate| match candidate.retrieval.get_or_insert_with(|| Ok(Vec::new())) {
            Ok(hits) => push_hit(hits, hit),
            Err(_) => panic!("a retrieval that failed has no hits; leave out `retrieval_failed` or `hit`"),
        })
    }

    /// Sets that retrieval found nothing for the current rewrite (policy or teacher).
    #[track_caller]
    pub fn nothing_found(self) -> Self {
        self.about("nothing_found", |candidate| candidate.retrieval = Some(Ok(Vec::new())))
    }

    /// Sets that retrieval failed for the current rewrite (policy or teacher).
    #[track_caller]
    pub fn retrieval_failed(self, kind: FailureKind, message: impl Into<String>) -> Self {
        let failure = CallFailure { kind, message: message.into() };
        self.about("retrieval_failed", |candidate| candidate.retrieval = Some(Err(failure)))
    }

    /// Sets the judge's score of the current rewrite (policy or teacher), 0 to 5.
    #[track_caller]
    pub fn judged(self, score: f64) -> Self {
        self.judged_because(score, "")
    }

    /// Like [`EpisodeBuilder::judged`], with the judge's reason.
    #[track_caller]
    pub fn judged_because(self, score: f64, reason: impl Into<String>) -> Self {
        check::sent(check::judge_score(score));
        let judgement = Some(Ok(JudgeScore { score, reason: reason.into() }));
        self.about("judged", |candidate| candidate.judgement = judgement)
    }

    /// Sets that the judge gave no usable response for the current rewrite (policy or teacher).
    #[track_caller]
    pub fn judgement_failed(self, kind: FailureKind, message: impl Into<String>) -> Self {
        let failure = CallFailure { kind, message: message.into() };
        self.about("judgement_failed", |candidate| candidate.judgement = Some(Err(failure)))
    }

    /// Sets the style distribution of the current rewrite (policy or teacher); it sums to 1.
    #[track_caller]
    pub fn style<T: Into<String>>(self, classes: impl IntoIterator<Item = (T, f64)>) -> Self {
        let classes = distribution(classes);
        self.about("style", |candidate| candidate.style = Some(classes))
    }

    /// Sets the number of tokens of the current rewrite (policy or teacher).
    #[track_caller]
    pub fn n_tokens(self, n_tokens: u32) -> Self {
        self.about("n_tokens", |candidate| candidate.n_tokens = Some(n_tokens))
    }

    /// Sets that the token limit ended the generation of the current rewrite (policy or teacher).
    #[track_caller]
    pub fn truncated(self) -> Self {
        self.about("truncated", |candidate| candidate.finish_reason = Some(FinishReason::Length))
    }

    fn side(mut self, side: Side, rewrite: String) -> Self {
        self.side = Some(side);
        self.about("side", |candidate| candidate.rewrite = Some(rewrite))
    }

    #[track_caller]
    fn about(mut self, word: &str, change: impl FnOnce(&mut Candidate)) -> Self {
        match self.side {
            Some(Side::Policy) => change(&mut self.episode.policy),
            Some(Side::Baseline) => change(self.episode.baseline.get_or_insert_default()),
            None => panic!("`{word}` is about one side; say `policy` or `baseline` before it"),
        }
        self
    }
}

/// Builder of a [`Sample`], which it dereferences to.
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub struct SampleBuilder(Sample);

/// Builds a sample from the user's query and the teacher's rewrite, without hits.
///
/// ```
/// use querl_sdk::testing;
///
/// let sample = testing::sample("胶原咋吃", "胶原蛋白肽的服用方法").hit("kb-1", 0.9);
/// assert_eq!(sample.hits[0].rank, 1);
/// ```
pub fn sample(query: impl Into<String>, rewrite: impl Into<String>) -> SampleBuilder {
    SampleBuilder(Sample {
        id: "test".into(),
        original_query: query.into(),
        rewritten_query: rewrite.into(),
        ..Sample::default()
    })
}

impl SampleBuilder {
    /// Adds a hit of the rewrite, ranked below those before it. `reranker_score` is 0 to 1 and not above that of the hit before.
    #[track_caller]
    pub fn hit(self, id: impl Into<String>, reranker_score: f64) -> Self {
        self.hit_with_text(id, "", reranker_score)
    }

    /// Like [`SampleBuilder::hit`], with the text of the passage.
    #[track_caller]
    pub fn hit_with_text(mut self, id: impl Into<String>, text: impl Into<String>, reranker_score: f64) -> Self {
        push_hit(&mut self.0.hits, Hit { id: Some(id.into()), text: text.into(), reranker_score, ..Hit::default() });
        self
    }
}

/// Builder of a [`PromptInput`], which it dereferences to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct PromptInputBuilder(PromptInput);

/// Builds the input of a prompt from the user's query, without context. The judge's prompt also needs a
/// [`rewrite`](PromptInputBuilder::rewrite).
pub fn prompt_input(query: impl Into<String>) -> PromptInputBuilder {
    PromptInputBuilder(PromptInput { query: query.into(), context: Context::default(), rewrite: None })
}

impl PromptInputBuilder {
    /// Sets the rewrite to judge.
    pub fn rewrite(mut self, rewrite: impl Into<String>) -> Self {
        self.0.rewrite = Some(rewrite.into());
        self
    }
}

/// Builder of a [`Dialogue`], which it dereferences to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct DialogueBuilder(Dialogue);

/// Builds a dialogue without turns; the last turn added must be the assistant's.
///
/// ```
/// use querl_sdk::testing;
///
/// let dialogue = testing::dialogue().user("多少钱").assistant("您好，胶原蛋白肽每盒 199 元。");
/// assert_eq!(dialogue.turns.len(), 2);
/// ```
pub fn dialogue() -> DialogueBuilder {
    DialogueBuilder(Dialogue { id: "test".into(), turns: Vec::new() })
}

impl DialogueBuilder {
    /// Adds a turn of the system.
    pub fn system(mut self, content: impl Into<String>) -> Self {
        self.0.turns.push(Message::system(content));
        self
    }

    /// Adds a turn of the user.
    pub fn user(mut self, content: impl Into<String>) -> Self {
        self.0.turns.push(Message::user(content));
        self
    }

    /// Adds a turn of the assistant.
    pub fn assistant(mut self, content: impl Into<String>) -> Self {
        self.0.turns.push(Message::assistant(content));
        self
    }
}

/// Stand-in for the run's style model: the same result for every dialogue.
#[derive(Debug, Clone, PartialEq)]
pub struct StandInModel(Result<Vec<StyleProbability>, CallError>);

/// A stand-in style model that returns this distribution, which sums to 1.
///
/// ```
/// use querl_sdk::{StyleModel, testing};
///
/// let model = testing::style_model([("售前", 0.7), ("售后", 0.3)]);
/// assert_eq!(model.classify(&[]).unwrap()[0].label, "售前");
/// ```
#[track_caller]
pub fn style_model<T: Into<String>>(classes: impl IntoIterator<Item = (T, f64)>) -> StandInModel {
    StandInModel(Ok(distribution(classes)))
}

/// A stand-in for a run without a style model: each call fails as not configured.
pub fn no_style_model() -> StandInModel {
    StandInModel(Err(CallError::NotConfigured))
}

/// A stand-in style model whose calls fail.
pub fn failing_style_model(kind: FailureKind, message: impl Into<String>) -> StandInModel {
    StandInModel(Err(CallError::Failed(CallFailure { kind, message: message.into() })))
}

impl StyleModel for StandInModel {
    fn classify(&self, _: &[Message]) -> Result<Vec<StyleProbability>, CallError> {
        self.0.clone()
    }
}

#[track_caller]
fn push_hit(hits: &mut Vec<Hit>, hit: Hit) {
    let (rank, score) = (hits.len() as u32 + 1, hit.reranker_score);
    let above = hits.last().map_or(f64::INFINITY, |above| above.reranker_score);
    assert!(
        score <= above,
        "the host never sends this: hit {rank} scores {score}, above {above}; say the best hit first"
    );
    hits.push(Hit { rank, ..hit });
    check::sent(check::hits(hits));
}

#[track_caller]
fn distribution<T: Into<String>>(classes: impl IntoIterator<Item = (T, f64)>) -> Vec<StyleProbability> {
    let class = |(label, probability): (T, f64)| StyleProbability { label: label.into(), probability };
    let classes = classes.into_iter().map(class).collect::<Vec<_>>();
    check::sent(check::style(&classes));
    classes
}
