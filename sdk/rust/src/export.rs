//! The macro that registers a plugin.

/// Registers the types of a plugin, so that the crate builds as a component: `export!(reward: MyReward)`.
///
/// Write it once per crate, at the top level. The kinds are `prompt`, `filter`, `reward`, `group_reward` and `style_scorer`. A component
/// may have several kinds, but not both kinds of reward: `export!(prompt: MyPrompt, filter: MyFilter)`. The plugin's name and version are
/// those of the crate. In a native build, such as for `cargo test`, the macro only checks that the types implement their traits.
///
/// A component without this macro does not link: the name of the missing symbol in the linker's message says what to write.
///
/// ```
/// use querl_sdk::{Filter, Sample, SettingError, Settings, Verdict};
///
/// struct KeepAll;
///
/// impl Filter for KeepAll {
///     fn new(_: &Settings) -> Result<Self, SettingError> {
///         Ok(Self)
///     }
///
///     fn check(&mut self, _: &Sample) -> Verdict {
///         Verdict::Keep
///     }
/// }
///
/// querl_sdk::export!(filter: KeepAll);
/// # fn main() {}
/// ```
///
/// The compiler rejects the following with a message: a type that does not implement the trait of its kind,
///
/// ```compile_fail,E0277
/// struct NotAReward;
/// querl_sdk::export!(reward: NotAReward);
/// # fn main() {}
/// ```
///
/// an unknown kind, or a kind in another spelling,
///
/// ```compile_fail
/// # struct MyScorer;
/// querl_sdk::export!(scorer: MyScorer);
/// # fn main() {}
/// ```
///
/// ```compile_fail
/// # struct MyScorer;
/// querl_sdk::export!(style-scorer: MyScorer);
/// # fn main() {}
/// ```
///
/// and a second use in the same crate (pass several kinds to one use).
///
/// ```compile_fail,E0428
/// # use querl_sdk::{Filter, Sample, SettingError, Settings, Verdict};
/// # struct KeepAll;
/// # impl Filter for KeepAll {
/// #     fn new(_: &Settings) -> Result<Self, SettingError> { Ok(Self) }
/// #     fn check(&mut self, _: &Sample) -> Verdict { Verdict::Keep }
/// # }
/// querl_sdk::export!(filter: KeepAll);
/// querl_sdk::export!(filter: KeepAll);
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! export {
    ($($kind:ident : $plugin:ty),+ $(,)?) => {
        // A second use in the crate defines this type again, and the compiler's message contains its name.
        #[doc(hidden)]
        #[allow(non_camel_case_types, dead_code)]
        enum querl_sdk_export_stands_once_in_a_crate {}

        const _: fn(&$crate::Settings) -> Result<(), $crate::SettingError> = |_settings| {
            [$( $crate::__read_settings!($kind, $plugin, _settings) ),+].into_iter().collect()
        };

        $( $crate::__dev_entry!($kind, $plugin); )+

        #[cfg(target_arch = "wasm32")]
        const _: () = {
            // The symbol that `querl_sdk` imports, so that a component without this macro does not link.
            #[unsafe(export_name = "this plugin registers nothing; write querl_sdk::export!(reward: MyReward), or what kind it is, once in src/lib.rs")]
            extern "C" fn registered() {}

            struct QuerlIdentity;
            impl $crate::__guest::Identity for QuerlIdentity {
                const NAME: &'static str = env!("CARGO_PKG_NAME");
                const VERSION: &'static str = env!("CARGO_PKG_VERSION");
                const INPUTS: $crate::Inputs = $crate::Inputs::NONE$( .and($crate::__inputs!($kind, $plugin)) )+;
                fn kinds() -> Vec<$crate::__guest::Kind> {
                    vec![$( $crate::__kind!($kind) ),+]
                }
                fn check_settings(settings: &$crate::Settings) -> Result<(), $crate::SettingError> {
                    [$( $crate::__read_settings!($kind, $plugin, settings) ),+].into_iter().collect()
                }
                fn range(_settings: &$crate::Settings) -> Option<::std::ops::RangeInclusive<f64>> {
                    None$( .or($crate::__range!($kind, $plugin, _settings)) )+
                }
            }
            type QuerlInfo = $crate::__guest::InfoGuest<QuerlIdentity>;
            $crate::__guest::info::export_info!(QuerlInfo with_types_in $crate::__guest::info);
            $( $crate::__export_kind!($kind, $plugin); )+
        };
    };
    ($($other:tt)*) => {
        compile_error!(
            "write `export!(KIND: Type)`, for example `querl_sdk::export!(reward: MyReward)`; the kinds are prompt, filter, \
             reward, group_reward and style_scorer"
        );
    };
}

/// Expands to nothing: only builds with the feature `dev` export the function for `querl plugin dev`.
#[cfg(not(all(feature = "dev", not(target_arch = "wasm32"))))]
#[doc(hidden)]
#[macro_export]
macro_rules! __dev_entry {
    ($kind:ident, $plugin:ty) => {};
}

#[doc(hidden)]
#[macro_export]
macro_rules! __read_settings {
    (prompt, $plugin:ty, $settings:ident) => {
        <$plugin as $crate::Prompt>::new($settings).map(drop)
    };
    (filter, $plugin:ty, $settings:ident) => {
        <$plugin as $crate::Filter>::new($settings).map(drop)
    };
    (reward, $plugin:ty, $settings:ident) => {
        <$plugin as $crate::Reward>::new($settings).map(drop)
    };
    (group_reward, $plugin:ty, $settings:ident) => {
        <$plugin as $crate::GroupReward>::new($settings).map(drop)
    };
    (style_scorer, $plugin:ty, $settings:ident) => {
        <$plugin as $crate::StyleScorer>::new($settings).map(drop)
    };
    ($other:ident, $plugin:ty, $settings:ident) => {
        compile_error!(concat!(
            "`",
            stringify!($other),
            "` is not a kind of plugin; the kinds are prompt, filter, reward, group_reward and style_scorer"
        ))
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __export_kind {
    (prompt, $plugin:ty) => {
        type QuerlPrompt = $crate::__guest::PromptGuest<$plugin>;
        $crate::__guest::prompts::export_prompts!(QuerlPrompt with_types_in $crate::__guest::prompts);
    };
    (filter, $plugin:ty) => {
        type QuerlFilter = $crate::__guest::FilterGuest<$plugin>;
        $crate::__guest::filters::export_filters!(QuerlFilter with_types_in $crate::__guest::filters);
    };
    (reward, $plugin:ty) => {
        type QuerlReward = $crate::__guest::RewardGuest<$plugin>;
        $crate::__guest::rewards::export_rewards!(QuerlReward with_types_in $crate::__guest::rewards);
        $crate::__guest::packed_rewards::export_packed_rewards!(
            QuerlReward with_types_in $crate::__guest::packed_rewards
        );
    };
    (group_reward, $plugin:ty) => {
        type QuerlGroupReward = $crate::__guest::GroupRewardGuest<$plugin>;
        $crate::__guest::group_rewards::export_group_rewards!(
            QuerlGroupReward with_types_in $crate::__guest::group_rewards
        );
        $crate::__guest::packed_rewards::export_packed_rewards!(
            QuerlGroupReward with_types_in $crate::__guest::packed_rewards
        );
    };
    (style_scorer, $plugin:ty) => {
        type QuerlStyleScorer = $crate::__guest::StyleScorerGuest<$plugin>;
        $crate::__guest::style_scores::export_style_scores!(
            QuerlStyleScorer with_types_in $crate::__guest::style_scores
        );
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __kind {
    (prompt) => {
        $crate::__guest::Kind::Prompt
    };
    (filter) => {
        $crate::__guest::Kind::Filter
    };
    (reward) => {
        $crate::__guest::Kind::Reward
    };
    (group_reward) => {
        $crate::__guest::Kind::GroupReward
    };
    (style_scorer) => {
        $crate::__guest::Kind::StyleScorer
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __inputs {
    (filter, $plugin:ty) => {
        <$plugin as $crate::Filter>::INPUTS
    };
    (reward, $plugin:ty) => {
        <$plugin as $crate::Reward>::INPUTS
    };
    (group_reward, $plugin:ty) => {
        <$plugin as $crate::GroupReward>::INPUTS
    };
    ($other:ident, $plugin:ty) => {
        $crate::Inputs::NONE
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __range {
    (reward, $plugin:ty, $settings:ident) => {
        <$plugin as $crate::Reward>::new($settings).ok().map(|plugin| $crate::Reward::range(&plugin))
    };
    (group_reward, $plugin:ty, $settings:ident) => {
        <$plugin as $crate::GroupReward>::new($settings).ok().map(|plugin| $crate::GroupReward::range(&plugin))
    };
    ($other:ident, $plugin:ty, $settings:ident) => {
        None
    };
}
