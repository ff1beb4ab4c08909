//! What calls cost, by stage and provider, over all processes of a run; and the budget that stops them.

use crate::error::DataError;
use querl_core::records::{CallFailure, FailureKind};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The file is written this often at most: a kill loses what was counted since.
const SAVE_EVERY: Duration = Duration::from_secs(1);

/// What calls to one provider took in one stage.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Spent {
    /// Calls that were made, each with all its tries.
    pub calls: u64,
    /// Those that had no answer.
    pub failed: u64,
    /// Requests that were sent: calls and their further tries.
    pub tries: u64,
    /// Questions that the cache answered.
    pub cached: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Tokens of answers.
    pub completion_tokens: u64,
    /// Answers that said nothing of their tokens, which are then estimated.
    pub estimated: u64,
    /// Price of what was answered, in the configured currency.
    pub cost: f64,
    /// Tries that were sent and whose answer was lost on the way: they may have been charged.
    pub lost: u64,
    /// The most that they may have cost.
    pub lost_cost: f64,
    /// Answers whose price is unknown.
    pub unpriced: u64,
}

impl std::ops::AddAssign<&Spent> for Spent {
    fn add_assign(&mut self, other: &Self) {
        self.calls += other.calls;
        self.failed += other.failed;
        self.tries += other.tries;
        self.cached += other.cached;
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.estimated += other.estimated;
        self.cost += other.cost;
        self.lost += other.lost;
        self.lost_cost += other.lost_cost;
        self.unpriced += other.unpriced;
    }
}

/// By stage, then by provider: `rewrite`, `teacher gpt-5`.
pub type ByStage = BTreeMap<String, BTreeMap<String, Spent>>;

/// The account of a run.
#[derive(Debug, Default)]
pub struct Account {
    path: Option<PathBuf>,
    budget: Option<f64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    stage: String,
    by_stage: ByStage,
    /// The most that calls under way may cost.
    reserved: f64,
    saved: Option<Instant>,
}

impl Account {
    /// The account kept at `path`, with what earlier processes of the run spent.
    ///
    /// # Errors
    /// The file is there and is no account.
    pub fn open(path: &Path, budget: Option<f64>) -> Result<Self, DataError> {
        let by_stage = read_account(path)?;
        let state = State { by_stage, ..State::default() };
        Ok(Self { path: Some(path.to_owned()), budget, state: Mutex::new(state) })
    }

    /// What follows is counted for `stage`.
    pub fn begin(&self, stage: &str) {
        self.state().stage = stage.to_owned();
    }

    /// By stage and provider, all processes of the run together.
    pub fn by_stage(&self) -> ByStage {
        self.state().by_stage.clone()
    }

    /// Of one stage, all providers together.
    pub fn of_stage(&self, stage: &str) -> Spent {
        let mut total = Spent::default();
        self.state().by_stage.get(stage).into_iter().flat_map(BTreeMap::values).for_each(|spent| total += spent);
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

    /// Begins a call that costs `most` at most.
    ///
    /// # Errors
    /// It could exceed the budget, together with what was spent, what may have been charged, and what is under way.
    pub(crate) fn bill(self: &Arc<Self>, provider: &str, most: f64) -> Result<Bill, CallFailure> {
        let mut state = self.state();
        if let Some(budget) = self.budget {
            let all = || state.by_stage.values().flat_map(BTreeMap::values);
            let spent: f64 = all().map(|spent| spent.cost).sum();
            let lost: f64 = all().map(|spent| spent.lost_cost).sum();
            if most > 0.0 && spent + lost + state.reserved + most > budget {
                let message = format!(
                    "the budget of {budget} is spent: {spent:.4} was charged, {:.4} is under way or may have been charged, the next call may cost {most:.4}; raise `budget` and run the same command again to go on",
                    lost + state.reserved,
                );
                return Err(CallFailure { kind: FailureKind::OverBudget, message });
            }
        }
        state.reserved += most;
        Ok(self.new_bill(provider, most))
    }

    /// As [`bill`](Self::bill) for what is under way already, whatever the budget says.
    pub(crate) fn reserve(self: &Arc<Self>, provider: &str, most: f64) -> Bill {
        self.state().reserved += most;
        self.new_bill(provider, most)
    }

    fn new_bill(self: &Arc<Self>, provider: &str, most: f64) -> Bill {
        let (account, provider) = (self.clone(), provider.to_owned());
        Bill { account, provider, most, spent: Spent::default(), is_under_way: false }
    }

    pub(crate) fn count_cached(&self, provider: &str) {
        self.close(provider, &Spent { cached: 1, ..Spent::default() }, 0.0);
    }

    /// Ends a call: what it took stands on the account before its reservation is gone.
    fn close(&self, provider: &str, spent: &Spent, reserved: f64) {
        let is_due = {
            let mut state = self.state();
            state.reserved -= reserved;
            if *spent == Spent::default() {
                return;
            }
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

/// What the account at `path` holds; empty where there is none.
///
/// # Errors
/// The file is no account.
pub fn read_account(path: &Path) -> Result<ByStage, DataError> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
            DataError::file(path, format!("not an account of calls: {error}; remove the file to count anew"))
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(ByStage::default()),
        Err(error) => Err(DataError::file(path, format!("cannot be read: {error}"))),
    }
}

/// One call, from its beginning until its price is known. Dropping it puts it on the account.
#[derive(Debug)]
pub(crate) struct Bill {
    account: Arc<Account>,
    provider: String,
    most: f64,
    spent: Spent,
    /// A request is out whose end nobody has seen.
    is_under_way: bool,
}

/// What one answer took.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// The service said nothing.
    pub(crate) is_estimated: bool,
    pub(crate) cost: Option<f64>,
}

impl Bill {
    /// A request goes out.
    pub(crate) fn sent(&mut self) {
        self.spent.calls = 1;
        self.spent.tries += 1;
        self.is_under_way = true;
    }

    /// It came to an end that is known: an answer, a refusal, or nobody was reached.
    pub(crate) fn ended(&mut self) {
        self.is_under_way = false;
    }

    /// What became of it is unknown.
    pub(crate) fn lost(&mut self) {
        self.is_under_way = false;
        self.spent.lost += 1;
        self.spent.lost_cost += self.most;
    }

    /// All tries were in vain.
    pub(crate) fn failed(&mut self) {
        self.spent.failed = 1;
    }

    /// An answer came, useful or not.
    pub(crate) fn charged(&mut self, usage: Usage) {
        self.spent.prompt_tokens += usage.prompt_tokens;
        self.spent.completion_tokens += usage.completion_tokens;
        self.spent.estimated += u64::from(usage.is_estimated);
        self.spent.unpriced += u64::from(usage.cost.is_none());
        self.spent.cost += usage.cost.unwrap_or(0.0);
    }
}

impl Drop for Bill {
    fn drop(&mut self) {
        if self.is_under_way {
            // Cancelled: by a deadline, or by whoever stopped the run.
            self.lost();
            self.failed();
        }
        self.account.close(&self.provider, &self.spent, self.most);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn answer(account: &Arc<Account>, cost: f64) {
        let mut bill = account.bill("teacher m", cost).unwrap();
        bill.sent();
        bill.ended();
        bill.charged(Usage { prompt_tokens: 10, completion_tokens: 2, is_estimated: false, cost: Some(cost) });
    }

    #[test]
    fn spending_is_kept_by_stage_over_processes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("calls.json");
        for _ in 0..2 {
            let account = Arc::new(Account::open(&path, None).unwrap());
            account.begin("rewrite");
            answer(&account, 0.25);
            account.count_cached("teacher m");
            account.save().unwrap();
        }
        let account = Account::open(&path, None).unwrap();
        let spent = account.of_stage("rewrite");
        assert_eq!((spent.calls, spent.tries, spent.cached, spent.cost, spent.prompt_tokens), (2, 2, 2, 0.5, 20));
        assert_eq!(account.of_stage("eval"), Spent::default());
        std::fs::write(&path, "[]").unwrap();
        assert!(Account::open(&path, None).unwrap_err().to_string().contains("not an account of calls"));
    }

    #[test]
    fn budget_counts_what_is_under_way_and_what_was_lost() {
        let account = Arc::new(Account { budget: Some(1.0), ..Account::default() });
        answer(&account, 0.5);
        let under_way = account.bill("teacher m", 0.3).unwrap();
        assert_eq!(account.bill("teacher m", 0.3).unwrap_err().kind, FailureKind::OverBudget);
        assert!(account.bill("retrieval", 0.0).is_ok(), "what costs nothing is not stopped");
        drop(under_way);
        let mut cancelled = account.bill("teacher m", 0.3).unwrap();
        cancelled.sent();
        drop(cancelled);
        let failure = account.bill("teacher m", 0.3).unwrap_err();
        assert!(failure.kind.is_fatal());
        assert!(failure.message.starts_with("the budget of 1 is spent: 0.5000 was charged, 0.3000 is"), "{failure}");
        let spent = account.of_stage("");
        assert_eq!((spent.calls, spent.failed, spent.lost), (2, 1, 1));
    }
}
