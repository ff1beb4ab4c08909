//! Options of `[rl]` that exclude each other.

use super::schema::{Violation, wrong};
use super::training::{AdvantageForm, LossAgg, PolicyLossKind, RlAlgorithm, RlConfig};
use toml::Value;

pub(super) fn check_rl_options(rl: &RlConfig, violations: &mut Vec<Violation>) {
    check_dual_clip(rl, violations);
    let is_sequence = rl.advantage_form == AdvantageForm::Sequence;
    let is_raft = rl.algorithm == RlAlgorithm::Raft;
    let has_groups = rl.algorithm.needs_groups();
    let policy_loss = rl.policy_loss.name();
    let sequence = "rl.advantage_form = \"sequence\"";
    let refusals = [
        (
            is_sequence && rl.policy_loss != PolicyLossKind::Ppo,
            "rl.policy_loss",
            format!("is {policy_loss:?}; {sequence} has one ratio per response, expected \"ppo\""),
        ),
        (
            is_sequence && rl.loss_agg != LossAgg::Algorithm,
            "rl.loss_agg",
            format!("is {:?}; {sequence} averages over responses, expected \"algorithm\"", rl.loss_agg.name()),
        ),
        (
            is_raft && is_sequence,
            "rl.advantage_form",
            "is \"sequence\"; rl.algorithm = \"raft\" learns tokens, expected \"token\"".to_owned(),
        ),
        (
            is_raft && rl.policy_loss != PolicyLossKind::Ppo,
            "rl.policy_loss",
            format!("is {policy_loss:?}; rl.algorithm = \"raft\" has cross-entropy in its place, expected \"ppo\""),
        ),
        (
            is_raft && rl.clip_range_high.is_some(),
            "rl.clip_range_high",
            "is set; rl.algorithm = \"raft\" has cross-entropy without a clip, leave it out".to_owned(),
        ),
        (
            rl.dynamic_sampling && !has_groups,
            "rl.dynamic_sampling",
            "is true; rl.algorithm does not compare samples of one query, expected false".to_owned(),
        ),
        (
            rl.anchor_baseline.is_some() && !has_groups,
            "rl.anchor_baseline",
            "is set; rl.algorithm does not compare samples of one query, leave it out".to_owned(),
        ),
        (
            rl.overlong_buffer_len > rl.max_new_tokens,
            "rl.overlong_buffer_len",
            format!("is {}; expected at most rl.max_new_tokens, {}", rl.overlong_buffer_len, rl.max_new_tokens),
        ),
    ];
    let refused = refusals.into_iter().filter(|(is_refused, ..)| *is_refused);
    violations.extend(refused.map(|(_, key, problem)| Violation::of(key, problem)));
}

fn check_dual_clip(rl: &RlConfig, violations: &mut Vec<Violation>) {
    let (key, dual_clip) = ("rl.dual_clip", rl.dual_clip);
    if dual_clip > 0.0 && dual_clip <= 1.0 {
        violations.push(wrong(key, &Value::Float(dual_clip), "0.0, or more than 1.0"));
    } else if dual_clip > 0.0 && rl.advantage_form == AdvantageForm::Sequence {
        let problem = format!("is {dual_clip:?}; rl.advantage_form = \"sequence\" has no such bound, expected 0.0");
        violations.push(Violation::of(key, problem));
    } else if dual_clip > 0.0 && rl.policy_loss != PolicyLossKind::Ppo {
        let loss = rl.policy_loss.name();
        let problem = format!("is {dual_clip:?}; rl.policy_loss = {loss:?} has no such bound, expected 0.0");
        violations.push(Violation::of(key, problem));
    }
}
