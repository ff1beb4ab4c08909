//! Limits that leave room above what was measured.

use super::measure::Measured;

/// A slow machine, a busy one, a first call: wall-clock time varies more than instructions do.
const TIME_MARGIN: f64 = 5.0;
const LEAST_TIMEOUT_MS: u64 = 500;
const MEMORY_STEP: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Suggestion {
    pub(super) fuel_per_call: u64,
    pub(super) fuel_per_item: u64,
    pub(super) timeout_ms: u64,
    pub(super) memory_bytes: usize,
}

impl Suggestion {
    /// The most that any call used, times `margin`, rounded up to figures that a person reads.
    pub(super) fn of(results: &[Measured], margin: f64) -> Self {
        let calls = || results.iter().flat_map(|result| &result.calls);
        let wall_ms = calls().map(|call| call.wall.as_secs_f64() * 1e3).fold(0.0, f64::max);
        let memory = calls().map(|call| call.memory_bytes).max().unwrap_or(0);
        let costs = results.iter().map(|result| FuelCost::of(results, result));
        let (call, item) =
            costs.fold((0.0_f64, 0.0_f64), |(call, item), cost| (call.max(cost.call), item.max(cost.item)));
        Self {
            fuel_per_call: round_up((call * margin) as u64),
            fuel_per_item: round_up((item * margin) as u64).max(1),
            timeout_ms: round_up((wall_ms * margin * TIME_MARGIN) as u64).max(LEAST_TIMEOUT_MS),
            memory_bytes: ((memory as f64 * margin) as usize).div_ceil(MEMORY_STEP).max(1) * MEMORY_STEP,
        }
    }

    /// `[limits]` of plugin.toml, to paste.
    pub(super) fn to_toml(self) -> String {
        let Self { fuel_per_call, fuel_per_item, timeout_ms, memory_bytes } = self;
        format!(
            "[limits]\nfuel_per_call = {fuel_per_call}\nfuel_per_item = {fuel_per_item}\ntimeout_ms = {timeout_ms}\n\
             memory_bytes = {memory_bytes}\n"
        )
    }
}

/// Where the fuel of a call goes: to start an instance, and to each item.
struct FuelCost {
    call: f64,
    item: f64,
}

impl FuelCost {
    /// The largest batch of the kind of `result` against its smallest tells what an item more costs. What single calls of the
    /// smallest differ by is an item heavier than others.
    fn of(results: &[Measured], result: &Measured) -> Self {
        let of_kind = || results.iter().filter(|other| other.kind == result.kind);
        let smallest = of_kind().min_by_key(|other| other.n_items).unwrap_or(result);
        let largest = of_kind().max_by_key(|other| other.n_items).unwrap_or(result);
        let fuel = |measured: &Measured| measured.calls.iter().map(|call| call.fuel as f64).collect::<Vec<_>>();
        let most = |fuel: &[f64]| fuel.iter().copied().fold(0.0, f64::max);
        let least = |fuel: &[f64]| fuel.iter().copied().fold(f64::INFINITY, f64::min);
        let (few, many) = (fuel(smallest), fuel(largest));
        let (call, n_more) = (most(&few), largest.n_items - smallest.n_items);
        let item = match n_more {
            0 => call / smallest.n_items as f64,
            n_more => (most(&many) - least(&few)).max(0.0) / n_more as f64 + (call - least(&few)),
        };
        Self { call, item }
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

    fn result(n_items: usize, fuel: [u64; 2]) -> Measured {
        let call = |fuel| Call { fuel, wall: Duration::from_millis(70), memory_bytes: 1_200_000 };
        Measured { kind: PluginKind::Reward, n_items, calls: fuel.map(call).into() }
    }

    #[test]
    fn limits_are_the_most_that_was_measured_with_room_and_round() {
        // 100 to start, 10 an item, one of them 15.
        let suggestion = Suggestion::of(&[result(1, [110, 115]), result(11, [210, 210])], 4.0);
        let expected = Suggestion { fuel_per_call: 460, fuel_per_item: 60, timeout_ms: 1400, memory_bytes: 5 << 20 };
        assert_eq!(suggestion, expected);
    }

    #[test]
    fn one_size_of_batch_gives_its_share_to_each_item() {
        let suggestion = Suggestion::of(&[result(10, [100, 200])], 2.0);
        assert_eq!((suggestion.fuel_per_call, suggestion.fuel_per_item), (400, 40));
    }

    #[test]
    fn figures_round_up_to_two_digits() {
        assert_eq!([0, 7, 99, 100, 101, 1234].map(round_up), [0, 7, 99, 100, 110, 1300]);
    }
}
