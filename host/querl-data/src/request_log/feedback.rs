//! User feedback in a request log: votes on passages by request, and the passages that become gold ids.
//!
//! A judgement is `useful`, or without it a score of 0.5 or more; it is about `passage`, or without it about all passages of `clicked`. What
//! is only clicked, or named without a judgement, is a click. The last judgement of a request about a passage replaces earlier ones.

use super::LogTableReport;
use super::lines::LoggedFeedback;
use crate::text::{hash_of, separates_ids};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Minimum score of a useful passage.
const USEFUL_SCORE: f64 = 0.5;
/// Maximum number of passages of one request.
const MAX_PASSAGES: usize = 1000;

/// The feedback of one request on one passage: useful, not useful, or only clicked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Vote {
    pub(super) passage: u32,
    is_useful: Option<bool>,
}

/// The votes of one request, and its lines.
#[derive(Default)]
struct OfRequest {
    votes: Vec<Vote>,
    n_lines: u64,
}

/// All feedback by tenant and request.
#[derive(Default)]
pub(super) struct Feedback {
    tenants: HashMap<String, OfTenant>,
    /// Feedback of the tenant selected by [`keep`](Self::keep).
    chosen: OfTenant,
    passages: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, u32>,
}

#[derive(Default)]
struct OfTenant {
    requests: HashMap<u64, OfRequest>,
    left_out: BTreeMap<&'static str, u64>,
    n_lines: u64,
}

impl Feedback {
    pub(super) fn add(&mut self, line: LoggedFeedback) {
        let LoggedFeedback { id, tenant, clicked, useful, score, passage, .. } = line;
        let of_tenant = self.tenants.entry(tenant).or_default();
        of_tenant.n_lines += 1;
        let judgement = useful.or(score.map(|score| score >= USEFUL_SCORE));
        let of_clicked = if passage.is_none() { judgement } else { None };
        let named = clicked.into_iter().map(|passage| (passage, of_clicked));
        let named: Vec<_> = named.chain(passage.map(|passage| (passage, judgement))).collect();
        if named.is_empty() {
            *of_tenant.left_out.entry("without a passage").or_default() += 1;
            return;
        }
        let of_request = of_tenant.requests.entry(hash_of(&id)).or_default();
        of_request.n_lines += 1;
        for (passage, is_useful) in named {
            let mut leave_out = |reason| *of_tenant.left_out.entry(reason).or_default() += 1;
            if passage.is_empty() || passage.contains(|c: char| separates_ids(c) || c.is_control()) {
                leave_out("passages whose id a table of gold ids cannot hold");
                continue;
            }
            let known = self.passages.len() as u32;
            let passage = match self.numbers.get(passage.as_str()) {
                Some(number) => *number,
                None => {
                    let passage: Arc<str> = passage.into();
                    self.passages.push(passage.clone());
                    self.numbers.insert(passage, known);
                    known
                }
            };
            let votes = &mut of_request.votes;
            match votes.iter().position(|vote| vote.passage == passage) {
                Some(at) => votes[at].is_useful = is_useful.or(votes[at].is_useful),
                None if votes.len() < MAX_PASSAGES => votes.push(Vote { passage, is_useful }),
                None => leave_out("passages beyond 1000 of one request"),
            }
        }
    }

    /// Selects the feedback of `tenant` and drops that of all others.
    pub(super) fn keep(&mut self, tenant: &str) {
        self.chosen = self.tenants.remove(tenant).unwrap_or_default();
        self.tenants.clear();
    }

    /// Removes and returns the votes of a request; empty if there are none.
    pub(super) fn take(&mut self, id: &str) -> Vec<Vote> {
        self.chosen.requests.remove(&hash_of(id)).map(|of_request| of_request.votes).unwrap_or_default()
    }

    /// Drops the votes of a request that is in no row, and counts them under `reason`.
    pub(super) fn skip(&mut self, id: &str, reason: &'static str) {
        if let Some(of_request) = self.chosen.requests.remove(&hash_of(id)) {
            *self.chosen.left_out.entry(reason).or_default() += of_request.n_lines;
        }
    }

    /// Counts the feedback that belongs to no request of the log, and writes the counts into `report`.
    pub(super) fn finish(&mut self, report: &mut LogTableReport) {
        let unknown: u64 = std::mem::take(&mut self.chosen.requests).into_values().map(|request| request.n_lines).sum();
        report.n_feedback = self.chosen.n_lines;
        report.feedback_left_out = std::mem::take(&mut self.chosen.left_out);
        if unknown > 0 {
            report.feedback_left_out.insert("for requests that are not in the log", unknown);
        }
    }

    pub(super) fn passage_bytes(&self, number: u32) -> usize {
        self.passages[number as usize].len()
    }

    /// The ids of the passages with these numbers, sorted.
    pub(super) fn passages(&self, numbers: &[u32]) -> Vec<String> {
        let mut ids: Vec<String> = numbers.iter().map(|number| self.passages[*number as usize].to_string()).collect();
        ids.sort();
        ids
    }
}

/// The number of votes on a passage over all requests of a row.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tally {
    n_useful: u64,
    n_not_useful: u64,
    n_clicked: u64,
}

impl Tally {
    pub(super) fn add(&mut self, vote: &Vote) {
        match vote.is_useful {
            Some(true) => self.n_useful += 1,
            Some(false) => self.n_not_useful += 1,
            None => self.n_clicked += 1,
        }
    }

    /// True if the passage becomes a gold id: more requests vote useful than not, or, without such votes, at least one clicked it.
    pub(super) fn is_gold(self) -> bool {
        match (self.n_useful, self.n_not_useful) {
            (0, 0) => self.n_clicked > 0,
            (n_useful, n_not_useful) => n_useful > n_not_useful,
        }
    }

    pub(super) fn is_contradicting(self) -> bool {
        self.n_not_useful > 0 && (self.n_useful > 0 || self.n_clicked > 0)
    }
}
