//! The search space of a sweep: the combinations of a grid, and the rungs of successive halving.

use crate::failure::Stop;
use querl_core::fsx::digest_hex;
use std::collections::BTreeSet;

/// A configuration key with the values to try, in the form of `--set`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GridKey {
    /// Dotted key, such as `rl.kl_coef`.
    pub key: String,
    /// Values to try: at least one, without duplicates.
    pub values: Vec<String>,
}

/// Settings of a combination: `KEY=VALUE` for each key, in the order of the keys.
pub(super) type Settings = Vec<String>;

/// Maximum number of combinations of a grid, because all are listed before some are drawn.
const MAX_COMBINATIONS: usize = 100_000;

impl GridKey {
    /// Parses `KEY=V1,V2`. A comma within brackets, braces or quotes belongs to a value.
    ///
    /// # Errors
    /// The text has another form, or a value occurs twice.
    pub fn parse(text: &str) -> Result<Self, Stop> {
        let malformed =
            || Stop::usage(format!("--grid `{text}`: expected KEY=V1,V2, such as --grid rl.kl_coef=0.01,0.05"));
        let (key, values) = text.split_once('=').ok_or_else(malformed)?;
        let (key, values) = (key.trim().to_owned(), split(values));
        if key.is_empty() || values.iter().any(String::is_empty) {
            return Err(malformed());
        }
        match (1..values.len()).find(|i| values[..*i].contains(&values[*i])) {
            Some(i) => {
                let twice = &values[i];
                Err(Stop::usage(format!("--grid {key}: the value {twice} is given twice; expected once")))
            }
            None => Ok(Self { key, values }),
        }
    }

    /// Refuses keys that would make the trials of a sweep incomparable.
    fn check(&self, metric: &str) -> Result<(), Stop> {
        let key = &self.key;
        let refused = |why: &str| Err(Stop::usage(format!("--grid {key}: {why}")));
        let is_below =
            |section: &str| key.strip_prefix(section).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let is_above = |section: &str| section.strip_prefix(key.as_str()).is_some_and(|rest| rest.starts_with('.'));
        let measured = ["data", "teacher", "fallback_teacher", "retrieval", "judge", "plugins.prompt"];
        match key.as_str() {
            "seed" => refused("a seed is no setting to choose; name the seeds with --seeds"),
            "output_dir" => refused("each trial has a run directory of its own, in the folder of --out"),
            _ if is_below("eval") => refused("a sweep does not evaluate on the test split, and the key has no effect"),
            _ if measured.into_iter().any(|section| is_below(section) || is_above(section)) => refused(
                "it changes what the validation split measures; make runs of their own and compare their reports",
            ),
            _ if is_below("plugins.rewards") || is_below("plugins.style_model") => {
                match metric.starts_with("val/reward") {
                    true => refused(&format!(
                        "it changes what {metric} measures; choose another --metric, such as val/win_rate or val/avg_quality"
                    )),
                    false => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}

/// The values between the commas of a list.
fn split(text: &str) -> Vec<String> {
    let (mut values, mut value, mut depth, mut quote) = (Vec::new(), String::new(), 0_usize, None);
    for c in text.chars() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[' | '{') => depth += 1,
            (None, ']' | '}') => depth = depth.saturating_sub(1),
            (None, ',') if depth == 0 => {
                values.push(std::mem::take(&mut value));
                continue;
            }
            (None, _) => {}
        }
        value.push(c);
    }
    values.push(value);
    values.iter().map(|value| value.trim().to_owned()).collect()
}

/// The combinations of a grid, the last key varying fastest; with `n_random`, that number of combinations, drawn without replacement with
/// `seed`.
///
/// # Errors
/// A key is given twice or must not vary, or the grid is too large.
pub(super) fn combinations(
    grid: &[GridKey],
    metric: &str,
    n_random: Option<usize>,
    seed: u64,
) -> Result<Vec<Settings>, Stop> {
    let mut keys = BTreeSet::new();
    for GridKey { key, .. } in grid {
        if !keys.insert(key) {
            return Err(Stop::usage(format!("--grid {key}: is given twice; give all its values at once")));
        }
    }
    grid.iter().try_for_each(|key| key.check(metric))?;
    let size = grid.iter().fold(1_usize, |size, key| size.saturating_mul(key.values.len()));
    if size > MAX_COMBINATIONS {
        let message = format!("--grid: {size} combinations; expected at most {MAX_COMBINATIONS}: leave out values");
        return Err(Stop::usage(message));
    }
    let mut all = vec![Settings::new()];
    for GridKey { key, values } in grid {
        let with_each = |settings: Settings| {
            values
                .iter()
                .map(move |value| [settings.as_slice(), &[format!("{key}={value}")]].concat())
                .collect::<Vec<_>>()
        };
        all = all.into_iter().flat_map(with_each).collect();
    }
    let Some(n) = n_random.filter(|n| *n < all.len()) else { return Ok(all) };
    // A seeded random order without a random generator: by digest.
    let mut drawn: Vec<(String, usize)> = all
        .iter()
        .enumerate()
        .map(|(i, settings)| (digest_hex(format!("{seed} {settings:?}").as_bytes()), i))
        .collect();
    drawn.sort();
    let mut chosen: Vec<usize> = drawn.into_iter().take(n).map(|(_, i)| i).collect();
    chosen.sort_unstable();
    Ok(chosen.into_iter().map(|i| all[i].clone()).collect())
}

/// The rungs of successive halving for `n` combinations, as shifts: on a rung, trials stop after `1 / 2^shift` of their steps, and the
/// better half of the combinations continues. The last shift is 0, the full length. Rungs that end at the same evaluation count once.
///
/// Source: Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", with a factor of 2.
pub(super) fn rungs(n: usize, n_steps: usize, eval_steps: usize) -> Vec<u32> {
    let n_halvings = n.max(1).next_power_of_two().trailing_zeros();
    let mut shifts: Vec<u32> = (0..=n_halvings).collect();
    shifts.dedup_by_key(|shift| rung_step(n_steps, eval_steps, *shift));
    shifts.reverse();
    shifts
}

/// The step at which a rung ends, which is a step with an evaluation.
pub(super) fn rung_step(n_steps: usize, eval_steps: usize, shift: u32) -> usize {
    n_steps.div_ceil(1 << shift).next_multiple_of(eval_steps.max(1)).min(n_steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(texts: &[&str]) -> Vec<GridKey> {
        texts.iter().map(|text| GridKey::parse(text).unwrap()).collect()
    }

    #[test]
    fn commas_within_a_value_do_not_separate_values() {
        let key = GridKey::parse("rl.stop_strings=[\"a\", \"b,c\"], [] ,['x']").unwrap();
        assert_eq!(key.values, ["[\"a\", \"b,c\"]", "[]", "['x']"]);
        for malformed in ["rl.kl_coef", "=1", "rl.kl_coef=", "rl.kl_coef=1,,2"] {
            let error = GridKey::parse(malformed).unwrap_err().to_string();
            let expected = "expected KEY=V1,V2, such as --grid rl.kl_coef=0.01,0.05";
            assert_eq!(error, format!("--grid `{malformed}`: {expected}"));
        }
        let error = GridKey::parse("rl.kl_coef=1,2,1").unwrap_err().to_string();
        assert_eq!(error, "--grid rl.kl_coef: the value 1 is given twice; expected once");
    }

    #[test]
    fn combinations_are_all_or_a_seeded_draw() {
        let grid = grid(&["rl.kl_coef=1,2,3", "sft.epochs=1,2"]);
        let all = combinations(&grid, "val/reward", None, 1).unwrap();
        assert_eq!(all.len(), 6);
        assert_eq!(all[..2], [["rl.kl_coef=1", "sft.epochs=1"], ["rl.kl_coef=1", "sft.epochs=2"]]);
        let draw = |n, seed| combinations(&grid, "val/reward", Some(n), seed).unwrap();
        assert_eq!((draw(3, 1), draw(3, 1).len(), draw(60, 1)), (draw(3, 1), 3, all.clone()));
        assert!((2..30).any(|seed| draw(3, seed) != draw(3, 1)));
        assert!(draw(3, 1).iter().all(|settings| all.contains(settings)));
    }

    #[test]
    fn keys_that_change_the_measure_are_refused() {
        let refusal = |key: &str, metric: &str| {
            combinations(&grid(&[&format!("{key}=1,2")]), metric, None, 1).map(drop).map_err(|error| error.to_string())
        };
        for key in
            ["seed", "output_dir", "data.split_seed", "retrieval.top_k", "teacher.path", "eval.n_beams", "plugins"]
        {
            assert!(refusal(key, "val/reward").unwrap_err().starts_with(&format!("--grid {key}: ")), "{key}");
        }
        let weight = "plugins.rewards.0.weight";
        assert!(refusal(weight, "val/reward").unwrap_err().contains("choose another --metric"));
        assert_eq!(refusal(weight, "val/win_rate"), Ok(()));
        assert_eq!(refusal("rl.kl_coef", "val/reward"), Ok(()));
        let twice = combinations(&grid(&["rl.gamma=1,0.9", "rl.gamma=0.5"]), "val/reward", None, 1).unwrap_err();
        assert_eq!(twice.to_string(), "--grid rl.gamma: is given twice; give all its values at once");
    }

    #[test]
    fn rungs_halve_the_combinations_and_end_at_evaluations() {
        let steps = |n, n_steps, eval_steps| -> Vec<usize> {
            rungs(n, n_steps, eval_steps).into_iter().map(|shift| rung_step(n_steps, eval_steps, shift)).collect()
        };
        assert_eq!(steps(8, 80, 10), [10, 20, 40, 80]);
        assert_eq!(steps(5, 100, 10), [20, 30, 50, 100]);
        // There is no evaluation in between.
        assert_eq!(steps(8, 4, 2), [2, 4]);
        assert_eq!(steps(8, 5, 10), [5]);
        assert_eq!(steps(1, 80, 10), [80]);
    }
}
