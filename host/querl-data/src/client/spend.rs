//! Spend of calls by stage and provider, over all processes of a run, and the budget that stops them.

use crate::error::DataError;
use querl_core::records::{CallFailure, FailureKind};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Minimum interval between writes of the file; a kill loses what was counted since.
const SAVE_EVERY: Duration = Duration::from_secs(1);

/// Calls, tokens and cost of one provider in one stage.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Spend {
    /// Calls that were made, each with all its tries.
    pub calls: u64,
    /// Those that had no answer.
    pub failed: u64,
    /// Requests that were sent: calls and their further tries.
    pub tries: u64,
    /// Requests answered by the response cache.
    pub cached: u64,
    /// Single-flight requests: answered by the call of a concurrent identical request.
    pub joined: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Tokens of answers.
    pub completion_tokens: u64,
    /// Responses without token counts, which are estimated.
    pub estimated: u64,
    /// Cost of responses, in the configured currency.
    pub cost: f64,
    /// Attempts whose response was lost: they may have been charged.
    pub lost: u64,
    /// The most that they may have cost.
    pub lost_cost: f64,
    /// Answers whose price is unknown.
    pub unpriced: u64,
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
    }
}

/// By stage, then by provider: `rewrite`, `teacher gpt-5`.
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
    held: Reserved,
    saved: Option<Instant>,
}

/// Reservations for calls of unknown cost.
#[derive(Debug, Default)]
struct Reserved {
    n: usize,
    most: f64,
}

impl Reserved {
    fn add(&mut self, most: f64) {
        self.n += 1;
        self.most += most;
    }

    fn remove(&mut self, most: f64) {
        self.n -= 1;
        // What rounding leaves is no call.
        self.most = if self.n == 0 { 0.0 } else { self.most - most };
    }
}

enum BudgetCheck {
    Covered,
    Uncertain,
}

impl SpendTracker {
    /// Opens the file at `path`, with the spend of earlier processes of the run.
    ///
    /// # Errors
    /// The file is invalid.
    pub fn open(path: &Path, budget: Option<f64>) -> Result<Self, DataError> {
        let by_stage = read_spend(path)?;
        let state = State { by_stage, ..State::default() };
        Ok(Self { path: Some(path.to_owned()), budget, state: Mutex::new(state), settled: Notify::new() })
    }

    /// Counts further calls for `stage`.
    pub fn begin(&self, stage: &str) {
        self.state().stage = stage.to_owned();
    }

    /// By stage and provider, all processes of the run together.
    pub fn by_stage(&self) -> SpendByStage {
        self.state().by_stage.clone()
    }

    /// Total of one stage without file transfers.
    pub fn of_stage(&self, stage: &str) -> Spend {
        let mut total = Spend::default();
        let state = self.state();
        let providers = state.by_stage.get(stage).into_iter().flatten();
        providers.filter(|(provider, _)| !is_file_transfer(provider)).for_each(|(_, spent)| total += spent);
        total
    }

    /// Writes the file.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn save(&self) -> Result<(), DataError> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut state = self.state();
        state.saved = Some(Instant::now());
        if state.by_stage.is_empty() {
            return Ok(());
        }
        let bytes = serde_json::to_vec_pretty(&state.by_stage).map_err(|error| DataError::write(path, error.into()))?;
        querl_core::fsx::write_atomic(path, &bytes).map_err(|error| DataError::write(path, error))
    }

    /// Reserves the highest cost of a request while it is in flight. Where reservations of others leave too little, waits for their
    /// real cost.
    pub(crate) async fn reserve(self: &Arc<Self>, most: f64) -> Result<Reservation, CallFailure> {
        loop {
            let mut settled = std::pin::pin!(self.settled.notified());
            // Before looking: what settles between the look and the wait counts, too.
            settled.as_mut().enable();
            {
                let mut state = self.state();
                if let BudgetCheck::Covered = self.check_budget(&state, most)? {
                    state.in_flight.add(most);
                    return Ok(Reservation::new(self.clone(), most, ReservationKind::InFlight));
                }
            }
            settled.await;
        }
    }

    /// Reserves the highest cost of a batch.
    pub(crate) fn reserve_for_batch(self: &Arc<Self>, most: f64) -> Result<Reservation, CallFailure> {
        let mut state = self.state();
        match self.check_budget(&state, most)? {
            BudgetCheck::Covered => state.held.add(most),
            BudgetCheck::Uncertain => return Err(self.over_budget(&state, most)),
        }
        Ok(Reservation::new(self.clone(), most, ReservationKind::Batch))
    }

    pub(crate) fn hold(self: &Arc<Self>, most: f64) -> Reservation {
        self.state().held.add(most);
        Reservation::new(self.clone(), most, ReservationKind::Batch)
    }

    fn check_budget(&self, state: &State, most: f64) -> Result<BudgetCheck, CallFailure> {
        let Some(budget) = self.budget.filter(|_| most > 0.0) else { return Ok(BudgetCheck::Covered) };
        let (spent, lost) = state.charged();
        let certain = spent + lost + state.held.most + most;
        match certain + state.in_flight.most > budget {
            false => Ok(BudgetCheck::Covered),
            true if certain > budget => Err(self.over_budget(state, most)),
            true => Ok(BudgetCheck::Uncertain),
        }
    }

    fn over_budget(&self, state: &State, most: f64) -> CallFailure {
        let (spent, lost) = state.charged();
        let (budget, open) = (self.budget.unwrap_or_default(), lost + state.held.most + state.in_flight.most);
        let message = format!(
            "the budget of {budget} is spent: {spent:.4} was charged, {open:.4} is in flight or may have been charged, the next call may cost {most:.4}; raise `budget` and run the same command to resume",
        );
        CallFailure { kind: FailureKind::OverBudget, message }
    }

    fn release(&self, most: f64, kind: ReservationKind) {
        let mut state = self.state();
        match kind {
            ReservationKind::InFlight => state.in_flight.remove(most),
            ReservationKind::Batch => state.held.remove(most),
        }
        drop(state);
        self.settled.notify_waiters();
    }

    pub(crate) fn count_cached(&self, provider: &str) {
        self.add(provider, &Spend { cached: 1, ..Spend::default() });
    }

    /// Counts `n` requests of unknown outcome, each of highest cost `most`.
    pub(crate) fn count_lost(&self, provider: &str, n: u64, most: f64) {
        self.add(provider, &Spend { lost: n, lost_cost: n as f64 * most, ..Spend::default() });
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
        // The sum of nothing would be -0.
        let sum = |of: fn(&Spend) -> f64| all().fold(0.0, |sum, spent| sum + of(spent));
        (sum(|spent| spent.cost), sum(|spent| spent.lost_cost))
    }
}

/// Whether a provider name stands for the file transfers of batches.
pub fn is_file_transfer(provider: &str) -> bool {
    provider.ends_with(" (batch) files")
}

/// The spend recorded at `path`; empty where there is no file.
///
/// # Errors
/// The file is invalid.
pub fn read_spend(path: &Path) -> Result<SpendByStage, DataError> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
            DataError::file(path, format!("not a record of spend: {error}; remove the file to start from zero"))
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(SpendByStage::default()),
        Err(error) => Err(DataError::file(path, format!("cannot be read: {error}"))),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReservationKind {
    InFlight,
    Batch,
}

/// A reserved part of the budget, released on drop.
#[derive(Debug)]
pub(crate) struct Reservation {
    account: Arc<SpendTracker>,
    most: f64,
    kind: ReservationKind,
}

impl Reservation {
    pub(super) fn new(account: Arc<SpendTracker>, most: f64, kind: ReservationKind) -> Self {
        Self { account, most, kind }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.account.release(self.most, self.kind);
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

/// Spend of one call with all its attempts, counted on drop.
#[derive(Debug)]
pub(crate) struct CallSpend {
    account: Arc<SpendTracker>,
    provider: String,
    spent: Spend,
    /// For the attempt in flight, and for its response until that is charged.
    reservation: Option<Reservation>,
    n_sent: u64,
    is_under_way: bool,
}

impl CallSpend {
    pub(crate) fn new(account: &Arc<SpendTracker>, provider: &str) -> Self {
        Self {
            account: account.clone(),
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

    /// The attempt was rejected or never connected: it costs nothing.
    pub(crate) fn refused(&mut self) {
        self.is_under_way = false;
        self.reservation = None;
    }

    pub(crate) fn lost(&mut self) {
        self.is_under_way = false;
        self.spent.lost += 1;
        self.spent.lost_cost += self.reservation.as_ref().map_or(0.0, |reservation| reservation.most);
        self.settle();
    }

    pub(crate) fn failed(&mut self) {
        self.spent.failed = u64::from(self.n_sent > 0);
    }

    pub(crate) fn charged(&mut self, usage: Usage) {
        self.spent.prompt_tokens += usage.prompt_tokens;
        self.spent.completion_tokens += usage.completion_tokens;
        self.spent.estimated += u64::from(usage.is_estimated);
        self.spent.unpriced += u64::from(usage.cost.is_none());
        self.spent.cost += usage.cost.unwrap_or(0.0);
    }

    fn settle(&mut self) {
        self.account.add(&self.provider, &std::mem::take(&mut self.spent));
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
#[path = "spend_tests.rs"]
mod tests;
