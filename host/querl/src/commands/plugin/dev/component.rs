//! Builds the component of a save and compares it with the native run.

use super::super::replay::{RecordedResults, open_reward, scoring};
use super::native::NativeReplay;
use querl_core::records::Episode;
use querl_eval::{BriefOutcome, Outcome};
use querl_pipeline::failure;
use querl_pipeline::plugins::scores_style;
use querl_plugin::{PluginHost, PluginSettings};
use serde::Serialize;
use std::path::Path;
use std::time::Instant;

/// Result of comparing the component with the native run of the same source.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "result")]
pub(super) enum Comparison {
    /// Every compared episode has the same result in both: total, components, code and detail.
    Equal { n_compared: usize, seconds: f64 },
    /// The first episode with different results.
    Differs { id: String, query: String, native: BriefOutcome, component: BriefOutcome, parts: String, seconds: f64 },
    /// The component was built, but no episode was scored natively that it could be compared on.
    Built { seconds: f64 },
    /// The component could not be built, loaded or called.
    Failed {
        message: String,
        /// The last lines of the build tool's output, or of the plugin's traceback.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        output: Vec<String>,
    },
}

impl Comparison {
    /// What the author has to repair; `None` if nothing.
    pub(super) fn failure(&self) -> Option<&'static str> {
        match self {
            Self::Differs { .. } => Some("the component differs from the native run"),
            Self::Failed { .. } => Some("the component cannot be built or called"),
            Self::Equal { .. } | Self::Built { .. } => None,
        }
    }

    pub(super) fn text(&self) -> String {
        match self {
            Self::Equal { n_compared, seconds } => {
                format!("built in {seconds:.1} s, equal to the native run on {n_compared} episodes")
            }
            Self::Differs { id, query, native, component, parts, .. } => {
                format!(
                    "differs from the native run first at {id}: native {native}, component {component}{parts}  {query}"
                )
            }
            Self::Built { seconds } => format!("built in {seconds:.1} s"),
            Self::Failed { message, output } => {
                let lines = output.iter().map(|line| format!("\n  {line}"));
                message.clone() + &lines.collect::<String>()
            }
        }
    }
}

/// Builds the component and scores with it the episodes that the native run has scored or rejected.
pub(super) fn compare(
    host: &PluginHost,
    folder: &Path,
    settings: &PluginSettings,
    (episodes, recording): (&[Episode], &RecordedResults),
    native: Option<&NativeReplay>,
) -> Comparison {
    let started = Instant::now();
    let compared = || -> anyhow::Result<Comparison> {
        let plugin = host.load(folder)?;
        let seconds = started.elapsed().as_secs_f64();
        let results = native.into_iter().flat_map(|native| &native.results);
        let (given, expected): (Vec<Episode>, Vec<&Outcome>) = episodes
            .iter()
            .cloned()
            .zip(results)
            .filter_map(|(episode, result)| Some((episode, result.outcome.as_ref().ok()?)))
            .unzip();
        if given.is_empty() || scores_style(&plugin) {
            return Ok(Comparison::Built { seconds });
        }
        let model = open_reward(host, &plugin, settings, recording)?;
        let scored = scoring::score(model.as_ref(), &given, "component")?;
        let differs = |((episode, native), component): ((&Episode, &&Outcome), &Outcome)| {
            (*native != component).then(|| difference(episode, native, component, seconds))
        };
        let first = given.iter().zip(&expected).zip(&scored).find_map(differs);
        Ok(first.unwrap_or(Comparison::Equal { n_compared: given.len(), seconds }))
    };
    compared().unwrap_or_else(|error| failed(&error))
}

/// Maximum number of lines of a build tool's output.
const N_OUTPUT_LINES: usize = 12;

fn failed(error: &anyhow::Error) -> Comparison {
    let details = failure::details(error).unwrap_or_default();
    let lines: Vec<&str> = details.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = &lines[lines.len().saturating_sub(N_OUTPUT_LINES)..];
    Comparison::Failed {
        message: failure::sentence_above_details(error),
        output: last.iter().map(|line| line.trim_end().to_owned()).collect(),
    }
}

fn difference(episode: &Episode, native: &Outcome, component: &Outcome, seconds: f64) -> Comparison {
    let (brief_native, brief_component) = (BriefOutcome::from(native), BriefOutcome::from(component));
    let parts = if brief_native == brief_component { " (their components or details differ)" } else { "" };
    Comparison::Differs {
        id: episode.id.clone(),
        query: episode.query.clone(),
        native: brief_native,
        component: brief_component,
        parts: parts.to_owned(),
        seconds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_plugin::PluginError;

    /// Regression: the output of the build tool was left out, and the message said that it was above.
    #[test]
    fn a_failed_build_has_the_last_lines_of_its_output() {
        let lines: Vec<String> = (0..20).map(|number| format!("at line {number}")).collect();
        let output = lines.join("\n") + "\n\nSyntaxError: invalid regular expression";
        let error = PluginError::Build { path: "p".into(), tool: "componentize-js", output, advice: String::new() };
        let found = failed(&error.into());
        let shown = lines[9..].join("\n  ");
        let expected = "plugin p: componentize-js could not build it: its output is below";
        assert_eq!(found.text(), format!("{expected}\n  {shown}\n  SyntaxError: invalid regular expression"));
        let json = serde_json::to_value(&found).unwrap();
        assert_eq!(json["result"], "failed");
        assert_eq!(json["message"], expected);
        assert_eq!(json["output"][11], "SyntaxError: invalid regular expression");
        let plain = failed(&anyhow::anyhow!("no"));
        assert_eq!(plain, Comparison::Failed { message: "no".into(), output: Vec::new() });
    }
}
