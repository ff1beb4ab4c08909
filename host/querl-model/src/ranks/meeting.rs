//! Where the ranks of a job meet: each brings something and takes what all have brought.

use super::RanksError;
#[cfg(any(feature = "cuda", test))]
use super::links::Link;
use super::links::Links;
use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

type Item = Arc<dyn Any + Send + Sync>;

/// All ranks of one job, in however many groups they meet.
pub(super) struct Party {
    failure: OnceLock<RanksError>,
    /// Which ranks have ended well: nobody may wait for them any more.
    ended: Vec<AtomicBool>,
    meetings: Mutex<Vec<Weak<Meeting>>>,
    links: Links,
}

impl Party {
    pub(super) fn new(world_size: usize) -> Arc<Self> {
        let ended = (0..world_size).map(|_| AtomicBool::new(false)).collect();
        Arc::new(Self { failure: OnceLock::new(), ended, meetings: Mutex::default(), links: Links::default() })
    }

    /// Ends the job for all: whoever waits, or will wait, hears of `failure`. Returns whether it is the first, which all are told.
    pub(super) fn fail(&self, failure: RanksError) -> bool {
        let is_first = self.failure.set(failure).is_ok();
        self.wake();
        self.links.end(|link| link.abort());
        is_first
    }

    /// Keeps what joins a rank with others outside of meetings: it is aborted when a rank fails, at once where one has, and closed
    /// when all have ended well.
    #[cfg(any(feature = "cuda", test))]
    pub(super) fn link(&self, link: Arc<dyn Link>) {
        self.links.add(link);
        // A rank that failed before has not seen it.
        if self.failure.get().is_some() {
            self.links.end(|link| link.abort());
        }
    }

    /// Waits until links that were aborted are at their end, though not for ever.
    pub(super) fn wait_for_links(&self) {
        self.links.wait();
    }

    /// All ranks have ended; those that failed have waited for the links' end themselves.
    pub(super) fn finish(&self) {
        if self.failure.get().is_none() {
            self.links.end(|link| link.close());
            self.links.wait();
        }
    }

    /// A rank has ended well.
    pub(super) fn end(&self, rank: usize) {
        self.ended[rank].store(true, Ordering::SeqCst);
        self.wake();
    }

    /// # Errors
    /// A rank has failed.
    pub(super) fn check(&self) -> Result<(), RanksError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    fn wake(&self) {
        for meeting in lock(&self.meetings).iter().filter_map(Weak::upgrade) {
            // Under the lock: whoever has looked and found nothing is waiting by now.
            let _state = lock(&meeting.state);
            meeting.changed.notify_all();
        }
    }
}

/// Some ranks of a job, which do everything here in the same order.
pub(super) struct Meeting {
    party: Arc<Party>,
    /// Their ranks in the job, ascending.
    pub(super) members: Vec<usize>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    round: u64,
    /// What the first to arrive calls the round, and its place.
    what: Option<(usize, String)>,
    brought: Vec<Option<Item>>,
    /// What all brought to the round before, until all have taken it.
    result: Vec<Item>,
    n_to_take: usize,
}

impl Meeting {
    pub(super) fn new(party: &Arc<Party>, members: Vec<usize>) -> Arc<Self> {
        let state = State { brought: vec![None; members.len()], ..State::default() };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let meeting = Arc::new(Self { party: party.clone(), members, state, changed });
        let mut meetings = lock(&party.meetings);
        meetings.retain(|meeting| meeting.strong_count() > 0);
        meetings.push(Arc::downgrade(&meeting));
        meeting
    }

    pub(super) fn party(&self) -> &Arc<Party> {
        &self.party
    }

    /// Waits until every member has brought something to the round `what`, and returns all of it in the order of the members.
    ///
    /// # Errors
    /// A rank has failed or ended, or two members are at different rounds.
    pub(super) fn exchange<T: Send + Sync + 'static>(
        &self,
        index: usize,
        what: String,
        mine: Arc<T>,
    ) -> Result<Vec<Arc<T>>, RanksError> {
        let all = self.meet(index, what.clone(), mine)?;
        if let Some(other) = all.iter().position(|item| !item.is::<T>()) {
            return Err(self.differ(index, &what, other, &format!("{what}, with values of another type")));
        }
        let typed = all.into_iter().map(|item| item.downcast::<T>());
        Ok(typed.map(|item| item.expect("all items were found to be of this type")).collect())
    }

    fn meet(&self, index: usize, what: String, mine: Item) -> Result<Vec<Item>, RanksError> {
        let mut state = lock(&self.state);
        // The round before is over once all have taken what came of it.
        while state.n_to_take > 0 {
            state = self.wait(state)?;
        }
        self.party.check()?;
        match &state.what {
            Some((first, other)) if *other != what => {
                let (first, other) = (*first, other.clone());
                drop(state);
                return Err(self.differ(index, &what, first, &other));
            }
            Some(_) => {}
            None => state.what = Some((index, what)),
        }
        state.brought[index] = Some(mine);
        let round = state.round;
        if state.brought.iter().all(Option::is_some) {
            let n_members = self.members.len();
            state.result = state.brought.iter_mut().filter_map(Option::take).collect();
            (state.round, state.n_to_take, state.what) = (round + 1, n_members, None);
            self.changed.notify_all();
        }
        while state.round == round {
            state = self.wait(state)?;
        }
        state.n_to_take -= 1;
        let result = if state.n_to_take > 0 { state.result.clone() } else { std::mem::take(&mut state.result) };
        self.changed.notify_all();
        Ok(result)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> Result<MutexGuard<'a, State>, RanksError> {
        self.party.check()?;
        let is_gone = |member: usize| self.party.ended[self.members[member]].load(Ordering::SeqCst);
        let gone = (0..self.members.len()).find(|&member| state.brought[member].is_none() && is_gone(member));
        if let Some(member) = gone {
            drop(state);
            let message = "it ended while another waited for it; this is a fault of querl, please report it".into();
            self.party.fail(RanksError::Failed { rank: self.members[member], message });
            self.party.check()?;
            return Ok(lock(&self.state));
        }
        Ok(self.changed.wait(state).unwrap_or_else(PoisonError::into_inner))
    }

    fn differ(&self, index: usize, what: &str, other_index: usize, other: &str) -> RanksError {
        let [rank, other_rank] = [index, other_index].map(|index| self.members[index]);
        let (what, other) = (what.to_owned(), other.to_owned());
        let failure = RanksError::Differ { rank, what, other_rank, other };
        self.party.fail(failure.clone());
        failure
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
