//! Between the bindings and the traits. Exists in components only; hidden, for [`export!`](crate::export).
#![allow(missing_docs, unreachable_pub, reason = "reached through the macro only; nothing here is for authors")]

mod arena;
mod convert;
mod packed;

use crate::{Filter, Prompt, Reward, SettingError, Settings, StyleModel, StyleScorer};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;

/// What the host offers, and the shared types.
pub mod imports {
    wit_bindgen::generate!({
        inline: "package querl:sdk-imports;
            world imports {
                import querl:plugin/types@0.1.0;
                import querl:plugin/settings@0.1.0;
                import querl:plugin/log@0.1.0;
                import querl:plugin/style-model@0.1.0;
            }",
        path: "wit",
        generate_all,
        generate_unused_types: true,
    });
}

/// One module for each exported interface, so that a component may export any selection of them.
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
    "package querl:sdk-info; world info { export querl:plugin/info@0.1.0; }",
    "export_info",
    "querl_sdk::__guest::info"
);
exported_interface!(
    prompts,
    "package querl:sdk-prompts; world prompts { export querl:plugin/prompts@0.1.0; }",
    "export_prompts",
    "querl_sdk::__guest::prompts",
    "querl:plugin/types@0.1.0"
);
exported_interface!(
    filters,
    "package querl:sdk-filters; world filters { export querl:plugin/filters@0.1.0; }",
    "export_filters",
    "querl_sdk::__guest::filters",
    "querl:plugin/types@0.1.0"
);
exported_interface!(
    rewards,
    "package querl:sdk-rewards; world rewards { export querl:plugin/rewards@0.1.0; }",
    "export_rewards",
    "querl_sdk::__guest::rewards",
    "querl:plugin/types@0.1.0"
);
exported_interface!(
    packed_rewards,
    "package querl:sdk-packed-rewards; world packed-rewards { export querl:plugin/packed-rewards@0.1.0; }",
    "export_packed_rewards",
    "querl_sdk::__guest::packed_rewards"
);
exported_interface!(
    style_scores,
    "package querl:sdk-style-scores; world style-scores { export querl:plugin/style-scores@0.1.0; }",
    "export_style_scores",
    "querl_sdk::__guest::style_scores",
    "querl:plugin/types@0.1.0"
);

use filters::exports::querl::plugin::filters as filters_wit;
use imports::querl::plugin::{style_model as style_model_wit, types as wit};
use info::exports::querl::plugin::info as info_wit;
use packed_rewards::exports::querl::plugin::packed_rewards as packed_wit;
use prompts::exports::querl::plugin::prompts as prompts_wit;
use rewards::exports::querl::plugin::rewards as rewards_wit;
use style_scores::exports::querl::plugin::style_scores as style_wit;

/// What the macro knows of the author's crate.
pub trait Identity {
    const NAME: &'static str;
    const VERSION: &'static str;

    /// Reads the settings of all kinds that the component holds.
    fn check_settings(settings: &Settings) -> Result<(), SettingError>;
}

/// Every guest below carries only a type.
pub struct InfoGuest<T>(PhantomData<T>);
pub struct PromptGuest<T>(PhantomData<T>);
pub struct FilterGuest<T>(PhantomData<T>);
pub struct RewardGuest<T>(PhantomData<T>);
pub struct StyleScorerGuest<T>(PhantomData<T>);

/// The host checks the settings before it calls anything else, so that only a host's mistake ends here.
fn checked<T>(plugin: Result<T, SettingError>) -> T {
    plugin.unwrap_or_else(|error| panic!("{error}"))
}

impl<T: Identity> info_wit::Guest for InfoGuest<T> {
    fn describe() -> info_wit::Description {
        info_wit::Description { name: T::NAME.to_owned(), version: T::VERSION.to_owned() }
    }

    fn check_settings() -> Result<(), info_wit::SettingError> {
        T::check_settings(&Settings::of_host())
            .map_err(|error| info_wit::SettingError { key: error.key, message: error.message })
    }
}

impl<T: Prompt> prompts_wit::Guest for PromptGuest<T> {
    fn messages(task: prompts_wit::Task, input: prompts_wit::Input) -> Vec<wit::Message> {
        let plugin = checked(T::new(&Settings::of_host()));
        let messages = plugin.messages(convert::task(task), &convert::prompt_input(input));
        messages.into_iter().map(convert::message_out).collect()
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
    fn range() -> rewards_wit::Bounds {
        let (min, max) = checked(T::new(&Settings::of_host())).range().into_inner();
        rewards_wit::Bounds { min, max }
    }

    fn score_batch(episodes: Vec<rewards_wit::Episode>) -> Vec<Result<rewards_wit::Score, wit::Rejection>> {
        let plugin = checked(T::new(&Settings::of_host()));
        let episodes = episodes.into_iter().map(convert::episode);
        episodes
            .map(|episode| {
                // The instance ends with this call, and its memory with it: freeing thirty texts one by one buys nothing.
                let episode = ManuallyDrop::new(episode);
                plugin.score(&episode).map(convert::score).map_err(convert::rejection)
            })
            .collect()
    }
}

impl<T: Reward> packed_wit::Guest for RewardGuest<T> {
    fn score_packed(episodes: Vec<u8>) -> Vec<u8> {
        packed::score_batch(&checked(T::new(&Settings::of_host())), episodes)
    }
}

impl<T: StyleScorer> style_wit::Guest for StyleScorerGuest<T> {
    fn score_batch(dialogues: Vec<style_wit::Dialogue>) -> Vec<Result<style_wit::StyleScore, wit::Rejection>> {
        let plugin = checked(T::new(&Settings::of_host()));
        let dialogues = dialogues.into_iter().map(convert::dialogue);
        dialogues
            .map(|dialogue| plugin.score(&dialogue, &HostModel).map(convert::style_score).map_err(convert::rejection))
            .collect()
    }
}

/// The style model that the host holds.
struct HostModel;

impl StyleModel for HostModel {
    fn classify(&self, turns: &[crate::Message]) -> Result<Vec<crate::StyleProbability>, crate::ClassifyError> {
        let turns: Vec<_> = turns.iter().cloned().map(convert::message_out).collect();
        match style_model_wit::classify(&turns) {
            Ok(distribution) => Ok(distribution.into_iter().map(convert::style_probability).collect()),
            Err(style_model_wit::ClassifyError::NotConfigured) => Err(crate::ClassifyError::NotConfigured),
            Err(style_model_wit::ClassifyError::Failed(failure)) => {
                Err(crate::ClassifyError::Failed(convert::call_failure(failure)))
            }
        }
    }
}
