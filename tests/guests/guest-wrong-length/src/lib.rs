//! Returns one score too few. Written with the generated bindings, because the SDK prevents this error.
#![allow(unsafe_code, missing_docs, reason = "generated bindings")]

wit_bindgen::generate!({ world: "reward", path: "../../../wit/0.2.0" });

use exports::querl::plugin::{info, rewards};
use querl::plugin::types::Rejection;

struct Guest;

impl info::Guest for Guest {
    fn describe() -> info::Description {
        info::Description {
            name: "guest-wrong-length".into(),
            version: "0.2.0".into(),
            kinds: vec![info::Kind::Reward],
            settings: Vec::new(),
            range: Some(rewards::Bounds { min: 0.0, max: 1.0 }),
            inputs: Vec::new(),
        }
    }

    fn check_settings() -> Result<(), info::SettingError> {
        Ok(())
    }
}

impl rewards::Guest for Guest {
    fn range() -> rewards::Bounds {
        rewards::Bounds { min: 0.0, max: 1.0 }
    }

    fn score_batch(episodes: Vec<rewards::Episode>) -> Vec<Result<rewards::Score, Rejection>> {
        let scores = episodes.iter().skip(1);
        scores.map(|_| Ok(rewards::Score { total: 0.5, components: Vec::new() })).collect()
    }
}

export!(Guest);
