//! Warnings about a policy optimisation that is going wrong.

use crate::Metrics;

/// Watches the metrics of successive steps.
#[derive(Debug, Default)]
pub(crate) struct Health {
    rewards: Vec<f64>,
    explained: Vec<f64>,
    first_entropy: Option<f64>,
    first_length: Option<f64>,
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

/// Share of distinct responses in a batch of different queries below which the policy says the same to everybody.
const MIN_DISTINCT_SHARE: f64 = 0.2;

/// Responses this many times as long (or as short) as at first have drifted.
const MAX_LENGTH_DRIFT: f64 = 2.5;

impl Health {
    /// Warnings that this step gives cause for; each kind is given once.
    pub(crate) fn check(&mut self, metrics: &Metrics) -> Vec<String> {
        let mut found = self.of_step(metrics);
        found.extend(self.of_trend(metrics));
        found.retain(|(kind, _)| !self.warned.contains(kind));
        self.warned.extend(found.iter().map(|(kind, _)| *kind));
        found.into_iter().map(|(_, text)| format!("warning: {text}")).collect()
    }

    /// What one step, beside the first, gives away.
    fn of_step(&mut self, metrics: &Metrics) -> Vec<(&'static str, &'static str)> {
        let get = |name: &str| metrics.get(name).copied();
        let (entropy, length) = (get("actor/entropy"), get("response_length/mean"));
        self.first_entropy = self.first_entropy.or(entropy);
        self.first_length = self.first_length.or(length);
        let ratio = |now: Option<f64>, first: Option<f64>| Some(now? / first?);
        let drift = ratio(length, self.first_length);
        let signs = [
            (
                get("actor/pg_clipfrac").is_some_and(|share| share > MAX_CLIP_FRACTION),
                (
                    "clip",
                    "more than half of the tokens are clipped: the updates are too aggressive, lower rl.learning_rate",
                ),
            ),
            (
                get("actor/ref_kl").is_some_and(|kl| kl > MAX_KL),
                ("kl", "the policy drifts far from the SFT policy (KL above 1 nat per token): raise rl.kl_coef"),
            ),
            (
                ratio(entropy, self.first_entropy).is_some_and(|share| share < MIN_ENTROPY_SHARE),
                ("entropy", "the entropy has collapsed: raise rl.ent_coef or lower rl.learning_rate"),
            ),
            (
                get("response/distinct_ratio").is_some_and(|share| share < MIN_DISTINCT_SHARE),
                ("repeats", "most queries get the same answer: raise rl.kl_coef, and look at the reward plugin"),
            ),
            (
                drift.is_some_and(|drift| !(1.0 / MAX_LENGTH_DRIFT..=MAX_LENGTH_DRIFT).contains(&drift)),
                ("length", "the length of the answers drifts: raise rl.kl_coef, and look at what the reward pays for"),
            ),
        ];
        signs.into_iter().filter(|(shows, _)| *shows).map(|(_, warning)| warning).collect()
    }

    /// What only a stretch of steps gives away.
    fn of_trend(&mut self, metrics: &Metrics) -> Vec<(&'static str, &'static str)> {
        self.rewards.extend(metrics.get("avg_reward"));
        self.explained.extend(metrics.get("critic/vf_explained_var"));
        let mut found = Vec::new();
        if stretches(&self.rewards).is_some_and(|(before, now)| now + 0.1 < before) {
            found.push(("reward", "the reward is falling: lower rl.learning_rate"));
        }
        if stretches(&self.explained).is_some_and(|(before, now)| now < 0.0 && now <= before) {
            found.push((
                "value",
                "the critic does not learn (it explains none of the returns): look at rl.critic_learning_rate",
            ));
        }
        found
    }
}

/// Means of the last stretch and the one before it.
fn stretches(values: &[f64]) -> Option<(f64, f64)> {
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

    /// How many warnings a run of 30 steps gives when `name` takes the values of `course`.
    fn warnings(name: &str, course: impl Fn(f64) -> f64) -> usize {
        let mut health = Health::default();
        (0..30).flat_map(|step| health.check(&metrics(&[(name, course(f64::from(step)))]))).count()
    }

    #[test]
    fn each_trouble_is_said_once_and_health_is_not_troubled() {
        assert_eq!(warnings("actor/pg_clipfrac", |_| 0.6), 1);
        assert_eq!(warnings("actor/pg_clipfrac", |_| 0.3), 0);
        assert_eq!(warnings("actor/ref_kl", |step| step * 0.05), 1);
        assert_eq!(warnings("actor/ref_kl", |_| 0.2), 0);
        assert_eq!(warnings("actor/entropy", |step| 2.0 / (1.0 + step)), 1);
        assert_eq!(warnings("actor/entropy", |step| 2.0 - step * 0.05), 0);
        assert_eq!(warnings("response/distinct_ratio", |_| 0.1), 1);
        assert_eq!(warnings("response/distinct_ratio", |_| 0.9), 0);
        assert_eq!(warnings("response_length/mean", |step| 10.0 + step), 1);
        assert_eq!(warnings("response_length/mean", |step| 10.0 - step * 0.3), 1);
        assert_eq!(warnings("response_length/mean", |step| 10.0 - step * 0.1), 0);
        assert_eq!(warnings("avg_reward", |step| -0.05 * step), 1);
        assert_eq!(warnings("avg_reward", |step| 0.05 * step), 0);
        assert_eq!(warnings("critic/vf_explained_var", |_| -0.2), 1);
        assert_eq!(warnings("critic/vf_explained_var", |step| 0.01 * step), 0);
    }
}
