//! Implements the exported interfaces of the contract by the plugin traits, for [`export!`](crate::export). Hidden, and compiled in
//! components only.
#![allow(missing_docs, unreachable_pub, reason = "reached through the macro only; nothing here is for authors")]

mod arena;
mod convert;
pub(crate) mod host;

use crate::host::CallError;
use crate::{Filter, GroupReward, Input, Inputs, Prompt, Reward, SettingError, Settings, StyleModel, StyleScorer};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::RangeInclusive;

/// Bindings of the host's interfaces and of the shared types.
pub mod imports {
    wit_bindgen::generate!({
        inline: "package querl:sdk-imports;
            world imports {
                import querl:plugin/types@0.2.0;
                import querl:plugin/settings@0.2.0;
                import querl:plugin/log@0.2.0;
                import querl:plugin/tokens@0.2.0;
                import querl:plugin/words@0.2.0;
                import querl:plugin/similarity@0.2.0;
                import querl:plugin/judge@0.2.0;
                import querl:plugin/style-model@0.2.0;
            }",
        path: "wit",
        generate_all,
        generate_unused_types: true,
    });
}

/// Generates the bindings of one exported interface in a module, so that a component can export any subset of the interfaces.
macro_rules! exported_interface {
    ($module:ident, $world:tt, $export_macro:tt, $path:tt $(, $types:tt)?) => {
        pub mod $module {
            wit_bindgen::generate!({
                inline: $world,
                path: "wit",
                $( with: { $types: crate::__guest::imports::querl::plugin::types }, )?
                pub_export_macro: true,
                export_macro_name: $export_macro,
                default_bindings_module: $path,
            });
        }
    };
}

exported_interface!(
    info,
    "package querl:sdk-info; world info { export querl:plugin/info@0.2.0; }",
    "export_info",
    "querl_sdk::__guest::info",
    "querl:plugin/types@0.2.0"
);
exported_interface!(
    prompts,
    "package querl:sdk-prompts; world prompts { export querl:plugin/prompts@0.2.0; }",
    "export_prompts",
    "querl_sdk::__guest::prompts",
    "querl:plugin/types@0.2.0"
);
exported_interface!(
    filters,
    "package querl:sdk-filters; world filters { export querl:plugin/filters@0.2.0; }",
    "export_filters",
    "querl_sdk::__guest::filters",
    "querl:plugin/types@0.2.0"
);
exported_interface!(
    rewards,
    "package querl:sdk-rewards; world rewards { export querl:plugin/rewards@0.2.0; }",
    "export_rewards",
    "querl_sdk::__guest::rewards",
    "querl:plugin/types@0.2.0"
);
exported_interface!(
    group_rewards,
    "package querl:sdk-group-rewards; world group-rewards { export querl:plugin/group-rewards@0.2.0; }",
    "export_group_rewards",
    "querl_sdk::__guest::group_rewards",
    "querl:plugin/types@0.2.0"
);
exported_interface!(
    packed_rewards,
    "package querl:sdk-packed-rewards; world packed-rewards { export querl:plugin/packed-rewards@0.2.0; }",
    "export_packed_rewards",
    "querl_sdk::__guest::packed_rewards"
);
exported_interface!(
    style_scores,
    "package querl:sdk-style-scores; world style-scores { export querl:plugin/style-scores@0.2.0; }",
    "export_style_scores",
    "querl_sdk::__guest::style_scores",
    "querl:plugin/types@0.2.0"
);

use filters::exports::querl::plugin::filters as filters_wit;
use group_rewards::exports::querl::plugin::group_rewards as group_wit;
use imports::querl::plugin::types as wit;
use info::exports::querl::plugin::info as info_wit;
pub use info_wit::Kind;
use packed_rewards::exports::querl::plugin::packed_rewards as packed_wit;
use prompts::exports::querl::plugin::prompts as prompts_wit;
use rewards::exports::querl::plugin::rewards as rewards_wit;
use style_scores::exports::querl::plugin::style_scores as style_wit;

/// Name, version, inputs and kinds of the author's crate; implemented by [`export!`](crate::export).
pub trait Identity {
    const NAME: &'static str;
    const VERSION: &'static str;
    const INPUTS: Inputs;

    fn kinds() -> Vec<Kind>;

    /// The range of totals of the reward under these settings; `None` if the component has no reward.
    fn range(settings: &Settings) -> Option<RangeInclusive<f64>>;

    /// Constructs the plugins of all kinds in the component with these settings, which reads every setting.
    fn check_settings(settings: &Settings) -> Result<(), SettingError>;
}

/// Implements the interface `info`; a marker for the type `T` of the plugin. The five types below are the same for the other interfaces.
pub struct InfoGuest<T>(PhantomData<T>);
pub struct PromptGuest<T>(PhantomData<T>);
pub struct FilterGuest<T>(PhantomData<T>);
pub struct RewardGuest<T>(PhantomData<T>);
pub struct GroupRewardGuest<T>(PhantomData<T>);
pub struct StyleScorerGuest<T>(PhantomData<T>);

/// The plugin. Panics on a setting error, which is an error of the host: it must call `check-settings` before any other function.
fn checked<T>(plugin: Result<T, SettingError>) -> T {
    plugin.unwrap_or_else(|error| panic!("{error}"))
}

impl<T: Identity> info_wit::Guest for InfoGuest<T> {
    fn describe() -> info_wit::Description {
        let mut range = None;
        let settings = Settings::recorded(|settings| {
            drop(T::check_settings(settings));
            range = T::range(settings);
        });
        let is_complete = settings.iter().all(|setting| setting.default.is_some());
        let inputs = Input::ALL.into_iter().filter(|input| T::INPUTS.contains(*input));
        info_wit::Description {
            name: T::NAME.to_owned(),
            version: T::VERSION.to_owned(),
            kinds: T::kinds(),
            settings: settings.into_iter().map(convert::setting).collect(),
            range: range.filter(|_| is_complete).map(convert::bounds),
            inputs: inputs.map(|input| convert::input(input, T::INPUTS.is_required(input))).collect(),
        }
    }

    fn check_settings() -> Result<(), info_wit::SettingError> {
        T::check_settings(&Settings::of_host())
            .map_err(|error| info_wit::SettingError { key: error.key, message: error.message })
    }
}

impl<T: Prompt> prompts_wit::Guest for PromptGuest<T> {
    fn messages(task: prompts_wit::Task, input: prompts_wit::Input) -> Result<Vec<wit::Message>, wit::Rejection> {
        let plugin = checked(T::new(&Settings::of_host()));
        let messages = plugin.messages(convert::task(task), &convert::prompt_input(input));
        messages.map(|messages| messages.into_iter().map(convert::message_out).collect()).map_err(convert::rejection)
    }

    fn parse_rewrite(text: String) -> Result<String, wit::Rejection> {
        checked(T::new(&Settings::of_host())).parse_rewrite(&text).map_err(convert::rejection)
    }

    fn parse_judgement(text: String) -> Result<wit::JudgeScore, wit::Rejection> {
        let parsed = checked(T::new(&Settings::of_host())).parse_judgement(&text).map_err(convert::rejection)?;
        Ok(wit::JudgeScore { score: parsed.score, reason: parsed.reason })
    }
}

impl<T: Filter> filters_wit::Guest for FilterGuest<T> {
    fn check_batch(samples: Vec<filters_wit::Sample>) -> Vec<filters_wit::Verdict> {
        let mut plugin = checked(T::new(&Settings::of_host()));
        let samples = samples.into_iter().map(convert::sample);
        samples.map(|sample| convert::verdict(plugin.check(&sample))).collect()
    }
}

impl<T: Reward> rewards_wit::Guest for RewardGuest<T> {
    fn range() -> wit::Bounds {
        convert::bounds(checked(T::new(&Settings::of_host())).range())
    }

    fn score_batch(episodes: Vec<wit::Episode>) -> Vec<Result<wit::Score, wit::Rejection>> {
        let plugin = checked(T::new(&Settings::of_host()));
        let episodes = episodes.into_iter().map(convert::episode);
        episodes
            .map(|episode| {
                // The texts of an episode, about thirty, are not freed one by one: the instance and its memory end with this call.
                let episode = ManuallyDrop::new(episode);
                convert::result(plugin.score(&episode))
            })
            .collect()
    }
}

impl<T: Reward> packed_wit::Guest for RewardGuest<T> {
    fn score_packed(episodes: Vec<u8>) -> Vec<u8> {
        crate::packed::score_batch(&checked(T::new(&Settings::of_host())), episodes)
    }
}

impl<T: GroupReward> group_wit::Guest for GroupRewardGuest<T> {
    fn range() -> wit::Bounds {
        convert::bounds(checked(T::new(&Settings::of_host())).range())
    }

    fn score_group(episodes: Vec<wit::Episode>) -> Vec<Result<wit::Score, wit::Rejection>> {
        let plugin = checked(T::new(&Settings::of_host()));
        let episodes = ManuallyDrop::new(episodes.into_iter().map(convert::episode).collect::<Vec<_>>());
        plugin.score_group(&episodes).into_iter().map(convert::result).collect()
    }
}

impl<T: GroupReward> packed_wit::Guest for GroupRewardGuest<T> {
    fn score_packed(episodes: Vec<u8>) -> Vec<u8> {
        crate::packed::score_group(&checked(T::new(&Settings::of_host())), episodes)
    }
}

impl<T: StyleScorer> style_wit::Guest for StyleScorerGuest<T> {
    fn score_batch(dialogues: Vec<style_wit::Dialogue>) -> Vec<Result<wit::Score, wit::Rejection>> {
        let plugin = checked(T::new(&Settings::of_host()));
        let dialogues = dialogues.into_iter().map(convert::dialogue);
        dialogues.map(|dialogue| convert::result(plugin.score(&dialogue, &HostModel))).collect()
    }
}

/// The host's style model, which a style scorer calls.
struct HostModel;

impl StyleModel for HostModel {
    fn classify(&self, turns: &[crate::Message]) -> Result<Vec<crate::StyleProbability>, CallError> {
        host::classify(turns)
    }
}
