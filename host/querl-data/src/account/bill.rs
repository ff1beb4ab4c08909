//! One call, from its beginning until its price is known.

use super::{Account, Spent};
use std::sync::Arc;

/// How long a reservation lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lasting {
    /// Until a call that is under way ends, which it does by itself.
    UnderWay,
    /// Until a batch is read.
    Held,
}

/// Money that is set aside. Dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Reservation {
    account: Arc<Account>,
    most: f64,
    lasting: Lasting,
}

impl Reservation {
    pub(super) fn new(account: Arc<Account>, most: f64, lasting: Lasting) -> Self {
        Self { account, most, lasting }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.account.release(self.most, self.lasting);
    }
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

/// A call with all its tries. Dropping it puts it on the account.
#[derive(Debug)]
pub(crate) struct Bill {
    account: Arc<Account>,
    provider: String,
    /// What is not on the account yet.
    spent: Spent,
    /// For the try that is under way, and for its answer until that is charged.
    reservation: Option<Reservation>,
    n_sent: u64,
    /// A request is out whose end nobody has seen.
    is_under_way: bool,
}

impl Bill {
    pub(crate) fn new(account: &Arc<Account>, provider: &str) -> Self {
        Self {
            account: account.clone(),
            provider: provider.to_owned(),
            spent: Spent::default(),
            reservation: None,
            n_sent: 0,
            is_under_way: false,
        }
    }

    /// The next try is paid from this.
    pub(crate) fn covered_by(&mut self, reservation: Reservation) {
        self.reservation = Some(reservation);
    }

    /// A request goes out.
    pub(crate) fn sent(&mut self) {
        self.spent.calls += u64::from(self.n_sent == 0);
        self.spent.tries += 1;
        self.n_sent += 1;
        self.is_under_way = true;
    }

    /// An answer came, which is charged next.
    pub(crate) fn answered(&mut self) {
        self.is_under_way = false;
    }

    /// It came to an end that is known and costs nothing: a refusal, or nobody was reached.
    pub(crate) fn refused(&mut self) {
        self.is_under_way = false;
        self.reservation = None;
    }

    /// What became of it is unknown: it may have been charged, and another try may be charged again.
    pub(crate) fn lost(&mut self) {
        self.is_under_way = false;
        self.spent.lost += 1;
        self.spent.lost_cost += self.reservation.as_ref().map_or(0.0, |reservation| reservation.most);
        self.settle();
    }

    /// All tries were in vain.
    pub(crate) fn failed(&mut self) {
        // Who sent nothing made no call.
        self.spent.failed = u64::from(self.n_sent > 0);
    }

    /// An answer came, useful or not.
    pub(crate) fn charged(&mut self, usage: Usage) {
        self.spent.prompt_tokens += usage.prompt_tokens;
        self.spent.completion_tokens += usage.completion_tokens;
        self.spent.estimated += u64::from(usage.is_estimated);
        self.spent.unpriced += u64::from(usage.cost.is_none());
        self.spent.cost += usage.cost.unwrap_or(0.0);
    }

    /// What was taken stands on the account before what was set aside for it is given back.
    fn settle(&mut self) {
        self.account.add(&self.provider, &std::mem::take(&mut self.spent));
        self.reservation = None;
    }
}

impl Drop for Bill {
    fn drop(&mut self) {
        if self.is_under_way {
            // Cancelled: by a deadline, or by whoever stopped the run.
            self.lost();
            self.failed();
        }
        self.settle();
    }
}
