//! Who wins against the teacher, by the sign of the total and by retrieval quality.

use super::change::DRAW_TOLERANCE;
use super::{PluginSide, ReplayEpisode, Scored, Side};
use querl_core::records::win;
use serde::Serialize;

/// What a total says of the policy against the teacher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sign {
    /// Above 0.
    Won,
    /// Within 1e-9 of 0.
    Drew,
    /// Below 0.
    Lost,
}

impl Sign {
    pub(super) fn of(total: f64) -> Self {
        match total {
            total if total > DRAW_TOLERANCE => Self::Won,
            total if total < -DRAW_TOLERANCE => Self::Lost,
            _ => Self::Drew,
        }
    }

    /// As texts say it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Won => "won",
            Self::Drew => "drew",
            Self::Lost => "lost",
        }
    }
}

/// Episodes by sign.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SignCounts {
    /// The policy has the better.
    pub won: usize,
    /// Neither has.
    pub drew: usize,
    /// The teacher has the better.
    pub lost: usize,
}

impl SignCounts {
    fn of(signs: impl Iterator<Item = Sign>) -> Self {
        let mut counts = Self::default();
        for sign in signs {
            match sign {
                Sign::Won => counts.won += 1,
                Sign::Drew => counts.drew += 1,
                Sign::Lost => counts.lost += 1,
            }
        }
        counts
    }

    /// All of them.
    pub fn n(&self) -> usize {
        self.won + self.drew + self.lost
    }

    /// Won, drew and lost as text: `12 (40.0 %)`.
    pub(super) fn cells(&self) -> [String; 3] {
        [self.won, self.drew, self.lost].map(|n| super::numbers::counted(n as u64, self.n() as u64))
    }
}

/// The signs of the totals of the episodes that both sides scored.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Signs {
    /// `None` where nothing was scored before.
    pub before: Option<SignCounts>,
    /// After.
    pub after: SignCounts,
    /// Episodes whose sign changed.
    pub n_changed: usize,
    /// From what to what.
    pub moves: Vec<SignMove>,
}

/// Episodes that had one sign and got another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SignMove {
    /// Before.
    pub from: Sign,
    /// After.
    pub to: Sign,
    /// Episodes.
    pub n: usize,
}

impl Signs {
    pub(super) fn of(scored: &[Scored<'_>]) -> Self {
        let pairs: Vec<(Sign, Sign)> =
            scored.iter().filter_map(|one| Some((Sign::of(one.before?.total), Sign::of(one.after.total)))).collect();
        let order = [Sign::Won, Sign::Drew, Sign::Lost];
        let all = order.into_iter().flat_map(|from| order.into_iter().map(move |to| (from, to)));
        let moves: Vec<SignMove> = all
            .filter(|(from, to)| from != to)
            .map(|(from, to)| SignMove { from, to, n: pairs.iter().filter(|pair| **pair == (from, to)).count() })
            .collect();
        Self {
            before: (!pairs.is_empty()).then(|| SignCounts::of(pairs.iter().map(|pair| pair.0))),
            after: SignCounts::of(scored.iter().map(|one| Sign::of(one.after.total))),
            n_changed: moves.iter().map(|one| one.n).sum(),
            moves,
        }
    }
}

/// Of all episodes where both sides were retrieved.
pub(super) fn by_retrieval(episodes: &[ReplayEpisode<'_>]) -> SignCounts {
    let sign = |one: &ReplayEpisode<'_>| {
        let (policy, baseline) = (one.episode.policy.retrieval.as_ref(), one.episode.baseline.retrieval.as_ref());
        Some(Sign::of(win(policy.ok()?, baseline.ok()?) - 0.5))
    };
    SignCounts::of(episodes.iter().filter_map(sign))
}

/// Why signs are not looked at, where a side's declared range does not span 0.
pub(super) fn without_meaning(before: &Side, after: &PluginSide) -> Option<String> {
    let before = match before {
        Side::Plugin(side) => Some(side),
        Side::Recorded => None,
    };
    let one_sided = before.into_iter().chain([after]).find(|side| !side.spans_zero())?;
    Some(format!(
        "{} {} declares totals from {} to {}, a range that does not span 0: the sign of a total does not say who wins, and no \
         signs are counted",
        one_sided.id, one_sided.version, one_sided.range.0, one_sided.range.1
    ))
}
