//! Spend of external calls by stage and provider, over all processes of a run, and the budget that limits it.

use crate::error::DataError;
use querl_core::fsx::{json_problem, read_bounded, write_json};
use querl_core::records::{CallFailure, FailureKind};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Minimum interval between writes of the file. A kill loses counts since then; with a budget never cost, which is written before a call
/// is sent.
const SAVE_EVERY: Duration = Duration::from_secs(1);

/// Maximum size of the file, which has a few hundred bytes for each stage and provider.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Calls, tokens and cost of one provider in one stage.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Spend {
    /// Number of calls; a call includes its retries.
    pub calls: u64,
    /// Number of calls that failed in all attempts.
    pub failed: u64,
    /// Number of requests sent, retries included.
    pub tries: u64,
    /// Number of requests answered from the response cache.
    pub cached: u64,
    /// Number of requests answered by a concurrent identical request (single-flight).
    pub joined: u64,
    /// Number of prompt tokens.
    pub prompt_tokens: u64,
    /// Number of completion tokens.
    pub completion_tokens: u64,
    /// Number of responses without token counts, whose tokens are estimated.
    pub estimated: u64,
    /// Cost of the responses, in the configured currency.
    pub cost: f64,
    /// Number of requests whose response was lost: the service may have charged them.
    pub lost: u64,
    /// Maximum cost of the lost requests, in the configured currency.
    pub lost_cost: f64,
    /// Number of responses without a known price, which `cost` does not include.
    pub unpriced: u64,
    /// Ids of the batches whose responses are counted: a batch is counted once, even if it is read again.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub batches: BTreeSet<String>,
}

impl Spend {
    /// Adds the tokens and cost of one response.
    pub(crate) fn add_usage(&mut self, usage: Usage) {
        self.prompt_tokens += usage.prompt_tokens;
        self.completion_tokens += usage.completion_tokens;
        self.estimated += u64::from(usage.is_estimated);
        self.unpriced += u64::from(usage.cost.is_none());
        self.cost += usage.cost.unwrap_or(0.0);
    }
}

impl std::ops::AddAssign<&Spend> for Spend {
    fn add_assign(&mut self, other: &Self) {
        self.calls = self.calls.saturating_add(other.calls);
        self.failed = self.failed.saturating_add(other.failed);
        self.tries = self.tries.saturating_add(other.tries);
        self.cached = self.cached.saturating_add(other.cached);
        self.joined = self.joined.saturating_add(other.joined);
        self.prompt_tokens = self.prompt_tokens.saturating_add(other.prompt_tokens);
        self.completion_tokens = self.completion_tokens.saturating_add(other.completion_tokens);
        self.estimated = self.estimated.saturating_add(other.estimated);
        self.cost += other.cost;
        self.lost = self.lost.saturating_add(other.lost);
        self.lost_cost += other.lost_cost;
        self.unpriced = self.unpriced.saturating_add(other.unpriced);
        self.batches.extend(other.batches.iter().cloned());
    }
}

/// Spend by stage, then by provider; for example `rewrite`, then `teacher gpt-5`.
pub type SpendByStage = BTreeMap<String, BTreeMap<String, Spend>>;

/// Counts spend and enforces the budget of a run.
#[derive(Debug, Default)]
pub struct SpendTracker {
    path: Option<PathBuf>,
    budget: Option<f64>,
    state: Mutex<State>,
    /// Notified whenever a call in flight ends.
    settled: Notify,
}

#[derive(Debug, Default)]
struct State {
    stage: String,
    by_stage: SpendByStage,
    in_flight: Reserved,
    /// Reservations of calls in flight under a budget, by stage and provider; the spend file counts them as lost.
    open: BTreeMap<CallKey, Reserved>,
    held: Reserved,
    saved: Option<Instant>,
    /// Number of requests of this process that were or may have been charged without a usable response, and the last such failure.
    unusable: Option<(u64, CallFailure)>,
}

/// Stage and provider.
type CallKey = (String, String);

/// Reservations for calls of unknown cost.
#[derive(Debug, Default)]
struct Reserved {
    n: usize,
    max_cost: f64,
}

impl Reserved {
    fn add(&mut self, max_cost: f64) {
        self.n += 1;
        self.max_cost += max_cost;
    }

    fn remove(&mut self, max_cost: f64) {
        self.n -= 1;
        // Without rounding errors.
        self.max_cost = if self.n == 0 { 0.0 } else { self.max_cost - max_cost };
    }
}

enum BudgetCheck {
    Covered,
    Uncertain,
}

impl SpendTracker {
    /// Opens the spend file at `path`, with the spend of earlier processes of the run; `budget` is in the configured currency.
    ///
    /// # Errors
    /// The file is invalid or cannot be read.
    pub fn open(path: &Path, budget: Option<f64>) -> Result<Self, DataError> {
        let by_stage = read_spend(path)?;
        let state = State { by_stage, ..State::default() };
        Ok(Self { path: Some(path.to_owned()), budget, state: Mutex::new(state), settled: Notify::new() })
    }

    /// Counts the spend of all further calls for `stage`.
    pub fn begin(&self, stage: &str) {
        self.state().stage = stage.to_owned();
    }

    /// Spend by stage and provider, summed over all processes of the run.
    pub fn by_stage(&self) -> SpendByStage {
        self.state().by_stage.clone()
    }

    /// Total spend of one stage, without file transfers of batches.
    pub fn of_stage(&self, stage: &str) -> Spend {
        let mut total = Spend::default();
        let state = self.state();
        let providers = state.by_stage.get(stage).into_iter().flatten();
        providers.filter(|(provider, _)| !is_file_transfer(provider)).for_each(|(_, spent)| total += spent);
        total
    }

    /// Writes the spend file, if the tracker has one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self) -> Result<(), DataError> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut state = self.state();
        state.saved = Some(Instant::now());
        // Calls in flight are lost if this is the last write before a kill.
        let mut spent = state.by_stage.clone();
        for ((stage, provider), Reserved { n, max_cost }) in &state.open {
            let lost = Spend { calls: *n as u64, lost: *n as u64, lost_cost: *max_cost, ..Spend::default() };
            *spent.entry(stage.clone()).or_default().entry(provider.clone()).or_default() += &lost;
        }
        if spent.is_empty() {
            return Ok(());
        }
        write_json(path, &spent).map_err(|error| DataError::write(path, error))
    }

    /// Reserves the maximum cost of a request to `provider` while it is in flight, and writes it to the spend file, so that a kill cannot
    /// lose it. If the reservations of other requests leave too little budget, waits until their actual cost is known.
    pub(crate) async fn reserve(self: &Arc<Self>, provider: &str, max_cost: f64) -> Result<Reservation, CallFailure> {
        let reservation = self.reserve_in_memory(provider, max_cost).await?;
        if reservation.key.is_some() {
            self.save().map_err(|error| {
                let message = format!("no call is made whose cost cannot be recorded: {error}");
                CallFailure { kind: FailureKind::OverBudget, message }
            })?;
        }
        Ok(reservation)
    }

    async fn reserve_in_memory(self: &Arc<Self>, provider: &str, max_cost: f64) -> Result<Reservation, CallFailure> {
        loop {
            let mut settled = std::pin::pin!(self.settled.notified());
            // Enabled before the check, so that no notification in between is lost.
            settled.as_mut().enable();
            {
                let mut state = self.state();
                if let BudgetCheck::Covered = self.check_budget(&state, max_cost)? {
                    state.in_flight.add(max_cost);
                    let is_recorded = self.budget.is_some() && max_cost > 0.0;
                    let key = is_recorded.then(|| (state.stage.clone(), provider.to_owned()));
                    if let Some(key) = &key {
                        state.open.entry(key.clone()).or_default().add(max_cost);
                    }
                    return Ok(Reservation { tracker: self.clone(), max_cost, kind: ReservationKind::InFlight, key });
                }
            }
            settled.await;
        }
    }

    /// Reserves the maximum cost of a batch.
    pub(crate) fn reserve_for_batch(self: &Arc<Self>, max_cost: f64) -> Result<Reservation, CallFailure> {
        let mut state = self.state();
        match self.check_budget(&state, max_cost)? {
            BudgetCheck::Covered => state.held.add(max_cost),
            BudgetCheck::Uncertain => return Err(self.over_budget(&state, max_cost)),
        }
        Ok(Reservation::of_batch(self.clone(), max_cost))
    }

    pub(crate) fn hold(self: &Arc<Self>, max_cost: f64) -> Reservation {
        self.state().held.add(max_cost);
        Reservation::of_batch(self.clone(), max_cost)
    }

    fn check_budget(&self, state: &State, max_cost: f64) -> Result<BudgetCheck, CallFailure> {
        let Some(budget) = self.budget.filter(|_| max_cost > 0.0) else { return Ok(BudgetCheck::Covered) };
        let (spent, lost) = state.charged();
        let certain = spent + lost + state.held.max_cost + max_cost;
        match certain + state.in_flight.max_cost > budget {
            false => Ok(BudgetCheck::Covered),
            true if certain > budget => Err(self.over_budget(state, max_cost)),
            true => Ok(BudgetCheck::Uncertain),
        }
    }

    fn over_budget(&self, state: &State, max_cost: f64) -> CallFailure {
        let (spent, lost) = state.charged();
        let (budget, open) = (self.budget.unwrap_or_default(), lost + state.held.max_cost + state.in_flight.max_cost);
        let unusable = state
            .unusable
            .as_ref()
            .map_or_else(String::new, |(n, last)| format!("; {n} request(s) had no usable answer, the last: {last}"));
        let message = format!(
            "the budget of {budget} is spent: {spent:.4} was charged, {open:.4} was in flight or may have been charged, the next call may cost {max_cost:.4}{unusable}; raise `budget` and run the same command to resume",
        );
        CallFailure { kind: FailureKind::OverBudget, message }
    }

    fn release(&self, Reservation { max_cost, kind, key, .. }: &Reservation) {
        let mut state = self.state();
        if let Some(reserved) = key.as_ref().and_then(|key| state.open.get_mut(key)) {
            reserved.remove(*max_cost);
        }
        state.open.retain(|_, reserved| reserved.n > 0);
        match kind {
            ReservationKind::InFlight => state.in_flight.remove(*max_cost),
            ReservationKind::Batch => state.held.remove(*max_cost),
        }
        let is_last = key.is_some() && state.open.is_empty();
        drop(state);
        self.settled.notify_waiters();
        // The file counts calls in flight as lost. The process may end before it is written again.
        if is_last {
            if let Err(error) = self.save() {
                tracing::warn!("{error}");
            }
            self.state().saved = None;
        }
    }

    pub(crate) fn count_cached(&self, provider: &str) {
        self.add(provider, &Spend { cached: 1, ..Spend::default() });
    }

    /// Counts `n` requests of unknown outcome, each with a cost of up to `max_cost`.
    pub(crate) fn count_lost(&self, provider: &str, n: u64, max_cost: f64) {
        self.add(provider, &Spend { lost: n, lost_cost: n as f64 * max_cost, ..Spend::default() });
    }

    /// Counts the responses of a batch, unless they are counted already, and writes the spend file: `spent` and the batch's id reach the
    /// file together, so that a kill cannot come between them.
    pub(crate) fn charge_batch(&self, provider: &str, batch_id: &str, spent: &Spend) -> Result<(), DataError> {
        {
            let mut state = self.state();
            let stage = state.stage.clone();
            let of_provider = state.by_stage.entry(stage).or_default().entry(provider.to_owned()).or_default();
            if of_provider.batches.insert(batch_id.to_owned()) {
                *of_provider += spent;
            }
        }
        self.save()
    }

    /// Notes the failure of a request that may have been charged, for the message of a spent budget.
    pub(crate) fn note_unusable(&self, failure: &CallFailure) {
        let mut state = self.state();
        let n = state.unusable.as_ref().map_or(0, |(n, _)| *n);
        state.unusable = Some((n + 1, failure.clone()));
    }

    pub(crate) fn count_joined(&self, provider: &str) {
        self.add(provider, &Spend { joined: 1, ..Spend::default() });
    }

    fn add(&self, provider: &str, spent: &Spend) {
        if *spent == Spend::default() {
            return;
        }
        let is_due = {
            let mut state = self.state();
            let stage = state.stage.clone();
            *state.by_stage.entry(stage).or_default().entry(provider.to_owned()).or_default() += spent;
            state.saved.is_none_or(|saved| saved.elapsed() >= SAVE_EVERY)
        };
        if is_due && let Err(error) = self.save() {
            tracing::warn!("{error}");
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl State {
    fn charged(&self) -> (f64, f64) {
        let all = || self.by_stage.values().flat_map(BTreeMap::values);
        // `sum` of an empty iterator is -0.
        let sum = |of: fn(&Spend) -> f64| all().fold(0.0, |sum, spent| sum + of(spent));
        (sum(|spent| spent.cost), sum(|spent| spent.lost_cost))
    }
}

/// True if `provider` is the name under which the file transfers of batches are counted.
pub fn is_file_transfer(provider: &str) -> bool {
    provider.ends_with(" (batch) files")
}

/// Reads the spend file at `path`; empty if there is none.
///
/// # Errors
/// The file is invalid or cannot be read.
pub fn read_spend(path: &Path) -> Result<SpendByStage, DataError> {
    match read_bounded(path, MAX_FILE_BYTES) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
            let problem = json_problem(&error);
            DataError::file(path, format!("not a record of spend: {problem}; remove the file to start from zero"))
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(SpendByStage::default()),
        Err(source) => Err(DataError::read(path, source)),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReservationKind {
    InFlight,
    Batch,
}

/// A reserved part of the budget, which is released on drop.
#[derive(Debug)]
pub(crate) struct Reservation {
    tracker: Arc<SpendTracker>,
    max_cost: f64,
    kind: ReservationKind,
    /// Stage and provider of a call that the spend file counts as lost until it ends; `None` for a batch or without a budget.
    key: Option<CallKey>,
}

impl Reservation {
    pub(super) fn of_batch(tracker: Arc<SpendTracker>, max_cost: f64) -> Self {
        Self { tracker, max_cost, kind: ReservationKind::Batch, key: None }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.tracker.release(self);
    }
}

/// Tokens and cost of one response.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    pub(crate) is_estimated: bool,
    pub(crate) cost: Option<f64>,
}

/// Spend of one call with all its attempts, added to the tracker on drop.
#[derive(Debug)]
pub(crate) struct CallSpend {
    tracker: Arc<SpendTracker>,
    provider: String,
    spent: Spend,
    /// Reservation of the attempt in flight, held until its response is charged.
    reservation: Option<Reservation>,
    n_sent: u64,
    is_under_way: bool,
}

impl CallSpend {
    pub(crate) fn new(tracker: &Arc<SpendTracker>, provider: &str) -> Self {
        Self {
            tracker: tracker.clone(),
            provider: provider.to_owned(),
            spent: Spend::default(),
            reservation: None,
            n_sent: 0,
            is_under_way: false,
        }
    }

    pub(crate) fn covered_by(&mut self, reservation: Reservation) {
        self.reservation = Some(reservation);
    }

    pub(crate) fn sent(&mut self) {
        self.spent.calls += u64::from(self.n_sent == 0);
        self.spent.tries += 1;
        self.n_sent += 1;
        self.is_under_way = true;
    }

    pub(crate) fn answered(&mut self) {
        self.is_under_way = false;
    }

    /// Records that the attempt was rejected or never connected, and so costs nothing.
    pub(crate) fn refused(&mut self) {
        self.is_under_way = false;
        self.reservation = None;
    }

    pub(crate) fn lost(&mut self) {
        self.is_under_way = false;
        self.spent.lost += 1;
        self.spent.lost_cost += self.reservation.as_ref().map_or(0.0, |reservation| reservation.max_cost);
        self.settle();
    }

    /// Records that the attempt was charged although its response cannot be used.
    pub(crate) fn unusable(&mut self, usage: Usage) {
        self.is_under_way = false;
        self.charged(usage);
        self.settle();
    }

    pub(crate) fn failed(&mut self) {
        self.spent.failed = u64::from(self.n_sent > 0);
    }

    pub(crate) fn charged(&mut self, usage: Usage) {
        self.spent.add_usage(usage);
    }

    fn settle(&mut self) {
        self.tracker.add(&self.provider, &std::mem::take(&mut self.spent));
        self.reservation = None;
    }
}

impl Drop for CallSpend {
    fn drop(&mut self) {
        if self.is_under_way {
            // Cancelled by a deadline or an interrupt.
            self.lost();
            self.failed();
        }
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn with_budget(budget: f64) -> Arc<SpendTracker> {
        Arc::new(SpendTracker { budget: Some(budget), ..SpendTracker::default() })
    }

    async fn start_call(tracker: &Arc<SpendTracker>, max_cost: f64) -> CallSpend {
        let mut call_spend = CallSpend::new(tracker, "teacher m");
        call_spend.covered_by(tracker.reserve("teacher m", max_cost).await.unwrap());
        call_spend.sent();
        call_spend
    }

    fn end_call(mut call_spend: CallSpend, cost: f64) {
        call_spend.answered();
        call_spend.charged(Usage { prompt_tokens: 10, completion_tokens: 2, is_estimated: false, cost: Some(cost) });
    }

    #[tokio::test]
    async fn spend_is_saved_by_stage_across_processes() {
        let (_folder, path) = crate::scratch_file("calls.json");
        for _ in 0..2 {
            let tracker = Arc::new(SpendTracker::open(&path, None).unwrap());
            tracker.begin("rewrite");
            end_call(start_call(&tracker, 0.25).await, 0.25);
            tracker.count_cached("teacher m");
            tracker.count_joined("teacher m");
            tracker.save().unwrap();
        }
        let tracker = SpendTracker::open(&path, None).unwrap();
        let spent = tracker.of_stage("rewrite");
        assert_eq!((spent.calls, spent.tries, spent.cached, spent.joined), (2, 2, 2, 2));
        assert_eq!((spent.cost, spent.prompt_tokens), (0.5, 20));
        assert_eq!(tracker.of_stage("eval"), Spend::default());
        std::fs::write(&path, "[]").unwrap();
        assert!(SpendTracker::open(&path, None).unwrap_err().to_string().contains("not a record of spend"));
    }

    #[tokio::test]
    async fn the_budget_includes_lost_attempts() {
        let tracker = with_budget(1.0);
        end_call(start_call(&tracker, 0.5).await, 0.5);
        assert!(tracker.reserve("teacher m", 0.0).await.is_ok(), "free calls need no budget");
        drop(start_call(&tracker, 0.3).await);
        let failure = tracker.reserve("teacher m", 0.3).await.unwrap_err();
        assert!(failure.kind.is_fatal());
        assert!(failure.message.starts_with("the budget of 1 is spent: 0.5000 was charged, 0.3000 was"), "{failure}");
        let spent = tracker.of_stage("");
        assert_eq!((spent.calls, spent.failed, spent.lost), (2, 1, 1));
    }

    /// Regression: twelve kills spent six times the budget, since the file did not have the calls in flight.
    #[tokio::test]
    async fn a_kill_cannot_lose_what_a_call_may_cost() {
        let (_folder, path) = crate::scratch_file("calls.json");
        let open = || Arc::new(SpendTracker::open(&path, Some(1.0)).unwrap());
        for n_killed in 0..2 {
            let tracker = open();
            tracker.begin("rewrite");
            assert_eq!(tracker.of_stage("rewrite").lost, n_killed);
            std::mem::forget(start_call(&tracker, 0.4).await);
        }
        let tracker = open();
        tracker.begin("rewrite");
        assert_eq!(tracker.reserve("teacher m", 0.4).await.unwrap_err().kind, FailureKind::OverBudget);
        end_call(start_call(&tracker, 0.2).await, 0.1);
        tracker.save().unwrap();
        let spent = open().of_stage("rewrite");
        assert_eq!((spent.calls, spent.lost, spent.lost_cost, spent.cost), (3, 2, 0.8, 0.1));
    }

    /// Regression: a run stopped with budget left, since calls in flight counted at their highest cost.
    #[tokio::test]
    async fn a_call_waits_for_the_real_cost_of_calls_in_flight() {
        let tracker = with_budget(1.2);
        let (first, second) = (start_call(&tracker, 0.5).await, start_call(&tracker, 0.5).await);
        let mut third = Box::pin(tracker.reserve("teacher m", 0.5));
        assert!(third.as_mut().now_or_never().is_none());
        end_call(first, 0.1);
        let third = third.await.unwrap();
        assert!(tracker.reserve("teacher m", 0.5).now_or_never().is_none(), "0.1 and twice 0.5 leave less than 0.5");
        drop(third);
        end_call(second, 0.5);
        assert_eq!(tracker.reserve("teacher m", 0.7).await.unwrap_err().kind, FailureKind::OverBudget);
        assert!(tracker.reserve("teacher m", 0.5).await.is_ok());
    }

    /// Regression: a call whose attempts were all charged cost several times its reservation.
    #[tokio::test]
    async fn each_lost_attempt_counts_before_the_next() {
        let tracker = with_budget(1.0);
        let mut call_spend = start_call(&tracker, 0.4).await;
        call_spend.lost();
        call_spend.covered_by(tracker.reserve("teacher m", 0.4).await.unwrap());
        call_spend.sent();
        call_spend.lost();
        assert_eq!(tracker.reserve("teacher m", 0.4).await.unwrap_err().kind, FailureKind::OverBudget);
        call_spend.failed();
        drop(call_spend);
        let spent = tracker.of_stage("");
        assert_eq!((spent.calls, spent.tries, spent.failed, spent.lost), (1, 2, 1, 2));
    }

    /// Regression: a call waited for a batch that is read only after the call.
    #[tokio::test]
    async fn a_call_does_not_wait_for_batches() {
        let tracker = with_budget(1.0);
        let batch = tracker.reserve_for_batch(0.8).unwrap();
        assert_eq!(
            tracker.reserve("teacher m", 0.3).now_or_never().unwrap().unwrap_err().kind,
            FailureKind::OverBudget
        );
        drop(batch);
        let in_flight = tracker.reserve("teacher m", 0.3).await.unwrap();
        assert_eq!(tracker.reserve_for_batch(0.8).unwrap_err().kind, FailureKind::OverBudget);
        drop(in_flight);
        drop(tracker.hold(7.0));
        assert!(tracker.reserve("teacher m", 1.0).await.is_ok());
    }

    /// Regression: the rounding error of reservations counted as calls in flight that never end.
    #[tokio::test]
    async fn no_call_waits_without_calls_in_flight() {
        let tracker = with_budget(0.31);
        for _ in 0..1000 {
            let open =
                [tracker.reserve("teacher m", 0.1).await.unwrap(), tracker.reserve("teacher m", 0.2).await.unwrap()];
            drop(open);
        }
        assert!(tracker.reserve("teacher m", 0.31).now_or_never().unwrap().is_ok());
    }

    use proptest::prelude::*;

    proptest! {
        #![proptest_config(crate::properties(64))]

        #[test]
        fn spend_is_read_back_and_a_damaged_file_is_no_spend_of_zero(
            provider in ".{0,8}", calls in any::<u64>(), cost in 0.0..1e12_f64, cut in any::<prop::sample::Index>(),
        ) {
            let (_folder, path) = crate::scratch_file("calls.json");
            let tracker = SpendTracker::open(&path, None).unwrap();
            tracker.add(&provider, &Spend { calls, cost, ..Spend::default() });
            tracker.save().unwrap();
            let written = tracker.by_stage();
            prop_assert_eq!(&read_spend(&path).unwrap(), &written);
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, &bytes[..cut.index(bytes.len())]).unwrap();
            let error = read_spend(&path).unwrap_err().to_string();
            prop_assert!(error.ends_with("; remove the file to start from zero") && !error.contains('\n'), "{error}");
        }
    }
}
