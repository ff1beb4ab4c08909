//! Violates the rule of the contract that the setting `breach` names; none if it is `none`. Written with the generated
//! bindings, because the SDK passes one sample at a time.
#![allow(unsafe_code, missing_docs, reason = "generated bindings")]

wit_bindgen::generate!({ world: "filter", path: "../../../wit/0.2.0" });

use exports::querl::plugin::{filters, info};
use filters::{Sample, Verdict};
use querl::plugin::settings;
use querl::plugin::types::Rejection;

struct Guest;

impl info::Guest for Guest {
    fn describe() -> info::Description {
        info::Description {
            name: "odd-filter".into(),
            version: "0.2.0".into(),
            kinds: vec![info::Kind::Filter],
            settings: vec![info::Setting {
                key: "breach".into(),
                value_type: info::SettingType::Text,
                default: Some("none".into()),
                minimum: None,
                maximum: None,
                choices: None,
                doc: None,
            }],
            range: None,
            inputs: Vec::new(),
        }
    }

    fn check_settings() -> Result<(), info::SettingError> {
        breach();
        Ok(())
    }
}

impl filters::Guest for Guest {
    fn check_batch(samples: Vec<Sample>) -> Vec<Verdict> {
        let breach = breach();
        let check = |(index, sample): (usize, &Sample)| match breach.as_str() {
            "looks_ahead" if repeats(sample, &samples[index + 1..]) => dropped("duplicate"),
            "needs_hits" => {
                assert!(!sample.hits.is_empty(), "no hits for `{}`", sample.id);
                Verdict::Keep
            }
            "no_code" if sample.rewritten_query.trim().is_empty() => dropped(""),
            _ if repeats(sample, &samples[..index]) => dropped("duplicate"),
            _ => Verdict::Keep,
        };
        let mut verdicts: Vec<_> = samples.iter().enumerate().map(check).collect();
        if breach == "forgets_the_last" && verdicts.len() > 10 {
            verdicts.pop();
        }
        verdicts
    }
}

fn breach() -> String {
    settings::get("breach").unwrap_or_else(|| "none".into())
}

fn repeats(sample: &Sample, others: &[Sample]) -> bool {
    others.iter().any(|other| other.original_query == sample.original_query)
}

fn dropped(code: &str) -> Verdict {
    Verdict::Drop(Rejection { code: code.into(), detail: String::new() })
}

export!(Guest);
