//! Warnings about a policy optimisation that is going wrong.

use crate::Metrics;

/// Watches the metrics of successive steps.
#[derive(Debug, Default)]
pub(crate) struct Health {
    rewards: Vec<f64>,
    value_losses: Vec<f64>,
    first_entropy: Option<f64>,
    warned: Vec<&'static str>,
}

/// Steps that are averaged before two stretches of a run are compared.
const WINDOW: usize = 10;

/// Source plan, section 3.6.7: above this the update is too aggressive.
const MAX_CLIP_FRACTION: f64 = 0.5;

/// Nats per token: far beyond what a useful drift from the reference needs.
const MAX_KL: f64 = 1.0;

/// Share of the first step's entropy below which a policy hardly explores any more.
const MIN_ENTROPY_SHARE: f64 = 0.05;

impl Health {
    /// Warnings that this step gives cause for; each kind is given once.
    pub(crate) fn check(&mut self, metrics: &Metrics) -> Vec<String> {
        let get = |name: &str| metrics.get(name).copied();
        let mut found = Vec::new();
        if get("actor/pg_clipfrac").is_some_and(|share| share > MAX_CLIP_FRACTION) {
            found.push((
                "clip",
                "more than half of the tokens are clipped: the updates are too aggressive, lower rl.learning_rate",
            ));
        }
        if get("actor/ref_kl").is_some_and(|kl| kl > MAX_KL) {
            found
                .push(("kl", "the policy drifts far from the SFT policy (KL above 1 nat per token): raise rl.kl_coef"));
        }
        let entropy = get("actor/entropy");
        self.first_entropy = self.first_entropy.or(entropy);
        if entropy.zip(self.first_entropy).is_some_and(|(now, first)| now < first * MIN_ENTROPY_SHARE) {
            found.push(("entropy", "the entropy has collapsed: raise rl.ent_coef or lower rl.learning_rate"));
        }
        self.rewards.extend(get("avg_reward"));
        self.value_losses.extend(get("critic/vf_loss"));
        if halves(&self.rewards).is_some_and(|(before, now)| now + 0.1 < before) {
            found.push(("reward", "the reward is falling: lower rl.learning_rate"));
        }
        if halves(&self.value_losses).is_some_and(|(before, now)| now > 1.5 * before) {
            found.push(("value", "the value loss does not fall: look at rl.critic_learning_rate"));
        }
        found.retain(|(kind, _)| !self.warned.contains(kind));
        self.warned.extend(found.iter().map(|(kind, _)| *kind));
        found.into_iter().map(|(_, text)| format!("warning: {text}")).collect()
    }
}

/// Means of the last stretch and the one before it.
fn halves(values: &[f64]) -> Option<(f64, f64)> {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let n = values.len();
    (n >= 2 * WINDOW).then(|| (mean(&values[n - 2 * WINDOW..n - WINDOW]), mean(&values[n - WINDOW..])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(pairs: &[(&str, f64)]) -> Metrics {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn too_much_clipping_is_said_once() {
        let mut health = Health::default();
        let step = metrics(&[("actor/pg_clipfrac", 0.6), ("actor/entropy", 1.0)]);
        assert_eq!(health.check(&step).len(), 1);
        assert!(health.check(&step).is_empty());
    }

    #[test]
    fn a_falling_reward_is_noticed_and_a_rising_one_is_not() {
        let run = |slope: f64| {
            let mut health = Health::default();
            (0..30).flat_map(|i| health.check(&metrics(&[("avg_reward", f64::from(i) * slope)]))).count()
        };
        assert_eq!((run(-0.05), run(0.05)), (1, 0));
    }
}
