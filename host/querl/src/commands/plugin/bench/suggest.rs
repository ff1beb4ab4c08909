//! Limits that leave room above what was measured.

use super::measure::Measured;

/// A slow machine, a busy one, a first call: wall-clock time varies more than instructions do.
const TIME_MARGIN: f64 = 5.0;
const LEAST_TIMEOUT_MS: u64 = 500;
const MEMORY_STEP: usize = 1 << 20;

/// `[limits]` for plugin.toml.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Suggestion {
    pub(super) fuel_per_item: u64,
    pub(super) timeout_ms: u64,
    pub(super) memory_bytes: usize,
}

impl Suggestion {
    /// The most that any call used, times `margin`, rounded up to figures that a person reads.
    pub(super) fn of(results: &[Measured], component_bytes: usize, margin: f64) -> Self {
        let calls = || results.iter().flat_map(|result| result.calls.iter().map(move |call| (result.n_items, call)));
        let fuel = calls().map(|(n_items, call)| call.fuel / n_items as u64).max().unwrap_or(0);
        let wall_ms = calls().map(|(_, call)| call.wall.as_secs_f64() * 1e3).fold(0.0, f64::max);
        let memory = calls().map(|(_, call)| call.memory_bytes).max().unwrap_or(component_bytes);
        let timeout_ms = (wall_ms * margin * TIME_MARGIN) as u64;
        Self {
            fuel_per_item: round_up((fuel as f64 * margin) as u64).max(1),
            timeout_ms: round_up(timeout_ms).max(LEAST_TIMEOUT_MS),
            memory_bytes: ((memory as f64 * margin) as usize).div_ceil(MEMORY_STEP).max(1) * MEMORY_STEP,
        }
    }

    /// To paste.
    pub(super) fn to_toml(self) -> String {
        let Self { fuel_per_item, timeout_ms, memory_bytes } = self;
        format!("[limits]\nfuel_per_item = {fuel_per_item}\ntimeout_ms = {timeout_ms}\nmemory_bytes = {memory_bytes}\n")
    }
}

/// Two leading digits: 1234 becomes 1300.
fn round_up(value: u64) -> u64 {
    let mut step = 1;
    while value / step >= 100 {
        step *= 10;
    }
    value.div_ceil(step) * step
}

#[cfg(test)]
mod tests {
    use super::super::PluginKind;
    use super::super::measure::Call;
    use super::*;
    use std::time::Duration;

    #[test]
    fn limits_are_the_most_that_was_measured_with_room_and_round() {
        let call = |fuel| Call { fuel, wall: Duration::from_millis(70), memory_bytes: 1_200_000 };
        let result = |n_items, fuel| Measured { kind: PluginKind::Reward, n_items, calls: vec![call(fuel), call(1)] };
        let suggestion = Suggestion::of(&[result(1, 3111), result(64, 64_000)], 40_000, 4.0);
        let expected = Suggestion { fuel_per_item: 13_000, timeout_ms: 1400, memory_bytes: 5 << 20 };
        assert_eq!(suggestion, expected);
    }

    #[test]
    fn figures_round_up_to_two_digits() {
        assert_eq!([0, 7, 99, 100, 101, 1234].map(round_up), [0, 7, 99, 100, 110, 1300]);
    }
}
