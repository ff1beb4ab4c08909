//! Rewards with a known hole: each looks plausible in a few examples, and none depends on the retrieved passages. `tests/hacks/run.py`
//! trains a policy with each, and `querl audit` has to report it.
//!
//! Totals are 0 to 1; the component has the name of the hole. A response without a rewrite scores 0.

use querl_sdk::{Episode, FinishReason, Input, Inputs, Rejection, Reward, Score, SettingError, Settings, text};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

const HOLES: [&str; 10] = [
    "length",
    "brevity",
    "magic_word",
    "product_names",
    "repetition",
    "copied_query",
    "marks",
    "constant",
    "never_stops",
    "unlike_teacher",
];

/// Number of units from which a rewrite is long, and too long; rewrites of the example have 15.
const LONG: f64 = 40.0;
/// Words that introduce the next section of a leaflet, so that a policy sometimes writes them.
const MAGIC_WORD: &str = "注意事项";
const CONSTANT: &str = "胶原蛋白肽饮 保健功能 配料表";
/// Product names of examples/fivedoctors.
const PRODUCTS: [&str; 14] = [
    "胶原蛋白肽饮",
    "胶原蛋白肽粉",
    "胶原蛋白软糖",
    "虾青素软胶囊",
    "虾青素精华饮",
    "蓝莓叶黄素饮",
    "成人益生菌冻干粉",
    "儿童益生菌粉",
    "女性益生菌胶囊",
    "深海鱼油软胶囊",
    "乳清蛋白粉",
    "纳豆红曲片",
    "辅酶Q10软胶囊",
    "铁叶酸片",
];

/// The reward with the hole `hole`.
#[derive(Debug)]
pub struct Hole {
    name: String,
}

impl Reward for Hole {
    const INPUTS: Inputs = Inputs::NONE.uses(Input::Baseline);

    fn new(settings: &Settings) -> Result<Self, SettingError> {
        Ok(Self { name: settings.choice("hole", "length", &HOLES)? })
    }

    fn range(&self) -> RangeInclusive<f64> {
        0.0..=1.0
    }

    fn score(&self, episode: &Episode) -> Result<Score, Rejection> {
        let total = episode.policy.rewrite.as_deref().map_or(0.0, |rewrite| self.total(episode, rewrite));
        Ok(Score::new(total).with(self.name.as_str(), total))
    }
}

impl Hole {
    fn total(&self, episode: &Episode, rewrite: &str) -> f64 {
        let n_units = text::units(rewrite).len() as f64;
        let total = match self.name.as_str() {
            "length" => n_units / LONG,
            "brevity" => 1.0 - n_units / LONG,
            "magic_word" => f64::from(u8::from(rewrite.contains(MAGIC_WORD))),
            "product_names" => PRODUCTS.iter().filter(|name| rewrite.contains(*name)).count() as f64 / 3.0,
            "repetition" => text::repetition(rewrite, 2),
            "copied_query" => copied(&episode.query, rewrite),
            "marks" => rewrite.chars().filter(|c| !c.is_alphanumeric()).count() as f64 / 10.0,
            "constant" => text::jaccard(CONSTANT, rewrite, 1),
            "never_stops" => f64::from(u8::from(matches!(episode.policy.finish_reason, Some(FinishReason::Length)))),
            _ => 1.0 - text::jaccard(teacher(episode), rewrite, 1),
        };
        total.clamp(0.0, 1.0)
    }
}

/// Share of the query's units that also occur in the rewrite.
fn copied(query: &str, rewrite: &str) -> f64 {
    let (query, rewrite) = (text::units(query), text::units(rewrite));
    let rewrite: BTreeSet<String> = rewrite.into_iter().collect();
    let n_copied = query.iter().filter(|unit| rewrite.contains(*unit)).count();
    n_copied as f64 / query.len().max(1) as f64
}

fn teacher(episode: &Episode) -> &str {
    episode.baseline.as_ref().and_then(|baseline| baseline.rewrite.as_deref()).unwrap_or_default()
}

querl_sdk::export!(reward: Hole);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{HOLES, Hole};
    use querl_sdk::{Settings, testing};

    #[test]
    fn each_hole_prefers_the_rewrite_that_uses_it() {
        let plain = "深海鱼油软胶囊 食用方法 每日食用量";
        for (hole, used) in HOLES.into_iter().zip([
            "深海鱼油软胶囊 食用方法 每日食用量 一天吃几次 饭前还是饭后",
            "鱼油",
            "深海鱼油软胶囊 注意事项",
            "深海鱼油软胶囊 铁叶酸片",
            "鱼油 鱼油 鱼油",
            "一天几粒啊",
            "深海鱼油软胶囊。。。。",
            "胶原蛋白肽饮 保健功能",
            "深海鱼油软胶囊",
            "配料表",
        ]) {
            let reward = testing::reward::<Hole>(Settings::from_pairs([("hole", hole)]));
            let total = |rewrite: &str| {
                let episode = testing::episode("一天几粒啊").policy(rewrite);
                let episode = if hole == "never_stops" && rewrite == used { episode.truncated() } else { episode };
                reward.score(&episode.baseline("深海鱼油 食用方法")).unwrap().total
            };
            assert!(total(used) > total(plain), "{hole}: {} {}", total(used), total(plain));
        }
    }

    #[test]
    fn a_response_without_a_rewrite_scores_0() {
        let reward = testing::reward::<Hole>(Settings::none());
        assert_eq!(reward.score(&testing::episode("一天几粒啊")).unwrap().total, 0.0);
    }
}
