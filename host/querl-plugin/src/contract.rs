//! What the host calls in a component of any version of the contract. Types and conversions of each version are in a folder of its name
//! (`v0_1`, `v0_2`); what is the same text in both is in [`exports`], [`conversions`] and [`calls`].

use crate::description::RawDescription;
use crate::guest::{Guest, HostRefusal};
use querl_core::ports::{InputUse, ParsedJudgement, PromptInput, PromptTask, RewardRange};
use querl_core::records::{Dialogue, EpisodeRef, Message, Rejection, Reward, Sample, Verdict};
use wasmtime::component::Instance;
use wasmtime::{Result, Store};

/// A plugin's result for one item, before it is checked.
pub(crate) type ItemResult = std::result::Result<Reward, Rejection>;

/// The error of `check-settings`: the key of the setting and the message of the plugin.
pub(crate) type SettingError = (String, String);

/// Result of a call of a prompt or filter function: a value or the plugin's rejection; `Err` if the call itself failed.
pub(crate) type Answer<T> = Result<std::result::Result<T, Rejection>>;

/// A component instance with its store, in which one call runs.
pub(crate) struct GuestInstance<'a> {
    pub(crate) store: &'a mut Store<Guest>,
    pub(crate) instance: &'a Instance,
}

/// The functions that the host calls in a component, for one version of the contract. Results are not checked here.
pub(crate) trait Contract: Send + Sync {
    /// Checks that the exported functions have the types of the contract, which only an instance shows.
    fn check_types(&self, guest: GuestInstance<'_>) -> Result<()>;
    fn describe(&self, guest: GuestInstance<'_>) -> Result<RawDescription>;
    fn check_settings(&self, guest: GuestInstance<'_>) -> Result<std::result::Result<(), SettingError>>;
    fn messages(&self, guest: GuestInstance<'_>, task: PromptTask, input: &PromptInput<'_>) -> Answer<Vec<Message>>;
    fn parse_rewrite(&self, guest: GuestInstance<'_>, text: &str) -> Answer<String>;
    fn parse_judgement(&self, guest: GuestInstance<'_>, text: &str) -> Answer<ParsedJudgement>;
    fn check_batch(&self, guest: GuestInstance<'_>, samples: &[&Sample], columns: InputUse) -> Result<Vec<Verdict>>;
    fn range(&self, guest: GuestInstance<'_>) -> Result<RewardRange>;
    /// Scores episodes as records: `rewards.score-batch` or `group-rewards.score-group`.
    fn score_records(&self, guest: GuestInstance<'_>, episodes: &[EpisodeRef<'_>]) -> Result<Vec<ItemResult>>;
    fn score_packed(&self, guest: GuestInstance<'_>, batch: &[u8]) -> Result<Vec<u8>>;
    fn score_json(&self, guest: GuestInstance<'_>, batch: &str) -> Result<String>;
    fn score_dialogues(&self, guest: GuestInstance<'_>, dialogues: &[&Dialogue]) -> Result<Vec<ItemResult>>;
    /// Encodes episodes as the argument of `score-packed`.
    fn pack(&self, episodes: &[EpisodeRef<'_>]) -> Vec<u8>;
    /// The rejection of an episode that this version of the contract cannot express; `None` if it can.
    fn inexpressible(&self, episode: &EpisodeRef<'_>) -> Option<Rejection>;
    fn has_packed_rewards(&self) -> bool;
    fn has_json_rewards(&self) -> bool;
}

/// The function indices of an exported interface. An error if the component does not export it, which its declared kinds exclude.
pub(crate) fn exported<T>(indices: Option<&T>) -> Result<&T> {
    indices.ok_or_else(|| wasmtime::Error::msg("the interface is not exported"))
}

/// Conversions whose text is the same in all versions, for types of `bindings`.
macro_rules! conversions {
    ($task:ty) => {
        pub(super) fn task(task: PromptTask) -> $task {
            match task {
                PromptTask::TeacherRewrite => prompts::Task::TeacherRewrite,
                PromptTask::PolicyRewrite => prompts::Task::PolicyRewrite,
                PromptTask::Judge => prompts::Task::Judge,
            }
        }

        pub(super) fn prompt_input<'a>(input: &'a PromptInput<'a>) -> prompts::Input<'a> {
            prompts::Input { query: input.query, context: context(input.context), rewrite: input.rewrite }
        }

        pub(super) fn message(message: types::MessageResult) -> Message {
            let role = match message.role {
                types::Role::System => "system",
                types::Role::User => "user",
                types::Role::Assistant => "assistant",
            };
            Message { role: role.to_owned(), content: message.content }
        }

        /// Messages whose roles were checked (`crate::text::is_role`).
        pub(super) fn messages(messages: &[Message]) -> Vec<types::MessageParam<'_>> {
            let role = |name: &str| match name {
                "system" => types::Role::System,
                "assistant" => types::Role::Assistant,
                _ => types::Role::User,
            };
            let params = messages
                .iter()
                .map(|message| types::MessageParam { role: role(&message.role), content: &message.content });
            params.collect()
        }

        pub(super) fn hits(hits: &[Hit]) -> Vec<types::Hit<'_>> {
            hits.iter().map(hit).collect()
        }

        fn classes(classes: &[StyleProbability]) -> Vec<types::StyleProbabilityParam<'_>> {
            let params = classes
                .iter()
                .map(|class| types::StyleProbabilityParam { label: &class.label, probability: class.probability });
            params.collect()
        }

        pub(super) fn rejection(rejection: types::Rejection) -> Rejection {
            Rejection::new(rejection.code, rejection.detail)
        }

        pub(super) fn verdict(verdict: filters::Verdict) -> Verdict {
            match verdict {
                filters::Verdict::Keep => Verdict::Keep,
                filters::Verdict::Drop(reason) => Verdict::Drop { code: reason.code, detail: reason.detail },
            }
        }

        fn call_failure(failure: &CallFailure) -> types::CallFailureParam<'_> {
            types::CallFailureParam { kind: failure_kind(failure.kind), message: &failure.message }
        }

        impl From<HostCallError> for CallError {
            fn from(error: HostCallError) -> Self {
                match error {
                    HostCallError::NotConfigured => Self::NotConfigured,
                    HostCallError::Failed(CallFailure { kind, message }) => {
                        Self::Failed(types::CallFailureResult { kind: failure_kind_result(kind), message })
                    }
                }
            }
        }
    };
}
pub(crate) use conversions;

/// Converts results of scoring, for the types of any version and interface.
macro_rules! scores {
    ($results:expr) => {
        $results
            .into_iter()
            .map(|result| match result {
                Ok(score) => Ok(Reward {
                    total: score.total,
                    components: score
                        .components
                        .into_iter()
                        .map(|part| RewardComponent { name: part.name, value: part.value })
                        .collect(),
                }),
                Err(rejection) => Err(convert::rejection(rejection)),
            })
            .collect()
    };
}
pub(crate) use scores;

/// The struct `Exports` of a version: `info`, and each interface that a component may export, with its name.
macro_rules! exports {
    ($($interface:ident = $name:literal),+ $(,)?) => {
        /// The exports of a component, looked up once.
        pub(crate) struct Exports {
            info: info::GuestIndices,
            $($interface: Option<$interface::GuestIndices>,)+
        }

        impl Exports {
            /// Looks up the interfaces for which `has` is true, and `info`.
            pub(crate) fn new(pre: &InstancePre<Guest>, has: impl Fn(&str) -> bool) -> Result<Self> {
                Ok(Self {
                    info: info::GuestIndices::new(pre)?,
                    $($interface: has($name).then(|| $interface::GuestIndices::new(pre)).transpose()?,)+
                })
            }

            fn check_interfaces(&self, guest: GuestInstance<'_>) -> Result<()> {
                check_interface("info", Some(self.info.load(&mut *guest.store, guest.instance)))?;
                $(
                    let loaded =
                        self.$interface.as_ref().map(|indices| indices.load(&mut *guest.store, guest.instance));
                    check_interface($name, loaded)?;
                )+
                Ok(())
            }
        }
    };
}
pub(crate) use exports;

/// Methods of [`Contract`] whose text is the same in all versions.
macro_rules! calls {
    () => {
        fn check_types(&self, guest: GuestInstance<'_>) -> Result<()> {
            self.check_interfaces(guest)
        }

        fn check_settings(&self, guest: GuestInstance<'_>) -> Result<std::result::Result<(), SettingError>> {
            let checked = self.info.load(&mut *guest.store, guest.instance)?.call_check_settings(guest.store)?;
            Ok(checked.map_err(|error| (error.key, error.message)))
        }

        fn parse_rewrite(&self, guest: GuestInstance<'_>, text: &str) -> Answer<String> {
            let prompts = exported(self.prompts.as_ref())?.load(&mut *guest.store, guest.instance)?;
            Ok(prompts.call_parse_rewrite(guest.store, text)?.map_err(convert::rejection))
        }

        fn parse_judgement(&self, guest: GuestInstance<'_>, text: &str) -> Answer<ParsedJudgement> {
            let prompts = exported(self.prompts.as_ref())?.load(&mut *guest.store, guest.instance)?;
            let parsed = prompts.call_parse_judgement(guest.store, text)?;
            let judgement = parsed.map(|judged| ParsedJudgement { score: judged.score, reason: judged.reason });
            Ok(judgement.map_err(convert::rejection))
        }

        fn score_packed(&self, guest: GuestInstance<'_>, batch: &[u8]) -> Result<Vec<u8>> {
            let rewards = exported(self.packed_rewards.as_ref())?.load(&mut *guest.store, guest.instance)?;
            rewards.call_score_packed(guest.store, batch)
        }

        fn score_dialogues(&self, guest: GuestInstance<'_>, dialogues: &[&Dialogue]) -> Result<Vec<ItemResult>> {
            let turns: Vec<_> = dialogues.iter().map(|dialogue| convert::messages(&dialogue.turns)).collect();
            let arguments: Vec<_> = dialogues
                .iter()
                .zip(&turns)
                .map(|(dialogue, turns)| style_scores::Dialogue { id: &dialogue.id, turns })
                .collect();
            let scorer = exported(self.style_scores.as_ref())?.load(&mut *guest.store, guest.instance)?;
            Ok(scores!(scorer.call_score_batch(guest.store, &arguments)?))
        }

        fn has_packed_rewards(&self) -> bool {
            self.packed_rewards.is_some()
        }
    };
}
pub(crate) use calls;

/// Fails if the functions of an interface, looked up in an instance, do not have the types of the contract.
pub(crate) fn check_interface<T>(interface: &str, loaded: Option<Result<T>>) -> Result<()> {
    let Some(Err(error)) = loaded else { return Ok(()) };
    let message = format!("its `{interface}` is not of the contract's types: {}", error.root_cause());
    Err(HostRefusal(message).into())
}
