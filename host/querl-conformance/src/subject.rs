//! The plugin under test, and stand-ins for a style model and for host functions.

use crate::meter::Meter;
use crate::section::CheckProgress;
use querl_core::config::{OnLimit, PluginLimits};
use querl_core::fsx::digest_hex;
use querl_core::ports::{Filter, HostFunctions, PluginFault, Prompts, RewardModel, StyleModel, StyleScorer};
use querl_core::records::{
    CallFailure, Dialogue, Episode, FailureKind, HostCall, HostCallError, HostRequest, HostResponse, Message,
    Rejection, Reward, Sample, StyleProbability,
};
use querl_plugin::{Compiler, HostOptions, Plugin, PluginError, PluginHost, PluginPort, PluginSettings, RewardForm};
use serde::Serialize;
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;

/// Options of the conformance suite for plugins.
#[derive(Debug, Clone)]
pub struct SuiteOptions {
    /// Limits of one call; plugin.toml may request lower ones.
    pub limits: PluginLimits,
    /// Number of repetitions of a call; calls of a slow plugin are repeated less often, and the report says how often.
    pub n_repeats: usize,
    /// Number of threads that call the plugin at the same time.
    pub n_threads: usize,
    /// Settings under which the plugin is tested.
    pub settings: PluginSettings,
    /// Folder in which compiled plugins are cached; `None` for the user's cache folder.
    pub cache_dir: Option<PathBuf>,
    /// Whether components are compiled in this process or in a child process.
    pub compiler: Compiler,
    /// Callback at the start and at the end of each check.
    pub progress: CheckProgress,
}

impl Default for SuiteOptions {
    fn default() -> Self {
        Self {
            limits: PluginLimits::default(),
            n_repeats: 1000,
            n_threads: 8,
            settings: PluginSettings::new(),
            cache_dir: None,
            compiler: Compiler::InProcessWithoutLimits,
            progress: CheckProgress::default(),
        }
    }
}

impl SuiteOptions {
    /// Host options that report limits as faults: with `on_limit = "drop"` a dropped item would look like a rejection.
    pub(crate) fn host_options(&self, meter: &Meter) -> HostOptions {
        let meter = meter.clone();
        HostOptions {
            limits: PluginLimits { on_limit: OnLimit::Fail, ..self.limits.clone() },
            cache_dir: self.cache_dir.clone(),
            compiler: self.compiler.clone(),
            observer: Some(Arc::new(move |call| meter.record(call))),
            n_slots: u32::try_from(self.n_threads).unwrap_or(u32::MAX),
            ..HostOptions::default()
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub(crate) host: &'a PluginHost,
    pub(crate) plugin: &'a Plugin,
    pub(crate) options: &'a SuiteOptions,
}

/// A plugin interface that takes a batch of items and gives one answer per item.
pub(crate) trait BatchPort: Send + Sync {
    type Item: Clone + Serialize + Send + Sync;

    /// One answer per item as JSON, equal bytes for equal answers.
    fn ask(&self, items: &[Self::Item]) -> Result<Vec<String>, PluginFault>;
}

impl Subject<'_> {
    pub(crate) fn settings(&self) -> &PluginSettings {
        &self.options.settings
    }

    /// Episodes without a baseline are rejected by the host, without a call, where the plugin has contract 0.1.
    pub(crate) fn has_contract_0_1(&self) -> bool {
        self.plugin.description().settings.is_none()
    }

    pub(crate) fn reward(&self, settings: &PluginSettings) -> Result<Box<dyn RewardModel>, PluginError> {
        self.reward_with(settings, None)
    }

    pub(crate) fn reward_with(
        &self,
        settings: &PluginSettings,
        functions: Option<Arc<dyn HostFunctions>>,
    ) -> Result<Box<dyn RewardModel>, PluginError> {
        self.host.open(self.plugin, settings, PluginPort::reward().with_functions(functions))
    }

    /// The reward plugin called in the given [`RewardForm`], with the settings of this test.
    pub(crate) fn reward_in(&self, form: RewardForm) -> Result<Box<dyn RewardModel>, PluginError> {
        self.host.open(self.plugin, self.settings(), PluginPort::reward_in(form))
    }

    pub(crate) fn filter(&self, settings: &PluginSettings) -> Result<Box<dyn Filter>, PluginError> {
        self.filter_with(settings, None)
    }

    pub(crate) fn filter_with(
        &self,
        settings: &PluginSettings,
        functions: Option<Arc<dyn HostFunctions>>,
    ) -> Result<Box<dyn Filter>, PluginError> {
        self.host.open(self.plugin, settings, PluginPort::filter().with_functions(functions))
    }

    pub(crate) fn prompts(&self, settings: &PluginSettings) -> Result<Box<dyn Prompts>, PluginError> {
        self.host.open(self.plugin, settings, PluginPort::prompts())
    }

    /// The style scorer, with a stand-in for the style model.
    pub(crate) fn style_scorer(&self, settings: &PluginSettings) -> Result<Box<dyn StyleScorer>, PluginError> {
        self.style_scorer_with(settings, Some(Arc::new(StandInModel)))
    }

    pub(crate) fn style_scorer_with(
        &self,
        settings: &PluginSettings,
        model: Option<Arc<dyn StyleModel>>,
    ) -> Result<Box<dyn StyleScorer>, PluginError> {
        self.host.open(self.plugin, settings, PluginPort::style_scorer(model))
    }
}

impl BatchPort for Box<dyn RewardModel> {
    type Item = Episode;

    fn ask(&self, items: &[Episode]) -> Result<Vec<String>, PluginFault> {
        Ok(self.score_batch(items)?.iter().map(scored).collect())
    }
}

impl BatchPort for Box<dyn StyleScorer> {
    type Item = Dialogue;

    fn ask(&self, items: &[Dialogue]) -> Result<Vec<String>, PluginFault> {
        Ok(self.score_batch(items)?.iter().map(scored).collect())
    }
}

impl BatchPort for Box<dyn Filter> {
    type Item = Sample;

    fn ask(&self, items: &[Sample]) -> Result<Vec<String>, PluginFault> {
        Ok(self.check_batch(items)?.iter().map(|verdict| json!(verdict).to_string()).collect())
    }
}

/// A score or rejection as JSON.
pub(crate) fn scored(scored: &Result<Reward, Rejection>) -> String {
    match scored {
        Ok(reward) => {
            // In the plugin's order, which is a part of the result.
            let parts: Vec<_> = reward.components.iter().map(|part| json!({&part.name: part.value})).collect();
            json!({"components": parts, "total": reward.total}).to_string()
        }
        Err(rejection) => json!({"rejected": rejection}).to_string(),
    }
}

const LABELS: [&str; 5] = ["售前", "售后", "投诉", "闲聊", "其他"];

/// Stand-in for a style model: a distribution derived from a digest of the dialogue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StandInModel;

impl StyleModel for StandInModel {
    fn classify(&self, turns: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        let text: Vec<_> = turns.iter().map(|turn| format!("{}\0{}", turn.role, turn.content)).collect();
        let weights = &digest_hex(text.join("\0").as_bytes()).into_bytes()[..LABELS.len()];
        let sum: u32 = weights.iter().map(|weight| u32::from(*weight)).sum();
        let class = |(label, weight): (&str, &u8)| StyleProbability {
            label: label.into(),
            probability: f64::from(*weight) / f64::from(sum),
        };
        Ok(LABELS.into_iter().zip(weights).map(class).collect())
    }
}

/// Stand-in for a style model that always fails.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FailingModel;

impl StyleModel for FailingModel {
    fn classify(&self, _: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        Err(CallFailure { kind: FailureKind::Timeout, message: "风格模型没有在30秒内回答".into() })
    }
}

/// Host functions with recorded results, the same for every item.
#[derive(Debug)]
pub(crate) struct RecordedCalls(pub(crate) Vec<HostCall>);

impl HostFunctions for RecordedCalls {
    fn call(&self, _: &str, _: &str, request: &HostRequest) -> Result<HostResponse, HostCallError> {
        recorded(&self.0, request)
    }
}

/// The result of the first call with this request.
pub(crate) fn recorded(calls: &[HostCall], request: &HostRequest) -> Result<HostResponse, HostCallError> {
    calls.iter().find(|call| call.request == *request).map_or_else(
        || {
            let message = "the recording has no result for this call".to_owned();
            Err(HostCallError::Failed(CallFailure { kind: FailureKind::NotRecorded, message }))
        },
        |call| call.response.clone(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stand_in_gives_distributions_that_differ_between_dialogues_and_repeat() {
        let dialogue = |text: &str| [Message { role: "assistant".into(), content: text.into() }];
        let one = StandInModel.classify(&dialogue("在的")).unwrap();
        assert_eq!(one, StandInModel.classify(&dialogue("在的")).unwrap());
        assert_ne!(one, StandInModel.classify(&dialogue("亲，在的")).unwrap());
        assert!((one.iter().map(|class| class.probability).sum::<f64>() - 1.0).abs() < 1e-9);
    }
}
