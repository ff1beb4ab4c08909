//! Rate limit of log lines, which are many under overload, while a service is down, or where a plugin floods its log.

use std::time::{Duration, Instant};

/// Admits a number of lines per interval and counts the others. An interval begins with the first line after the end of the last one.
#[derive(Debug)]
pub struct LogLimit {
    max_lines: u32,
    interval: Duration,
    /// Start of the interval and number of lines admitted in it; `None` before the first line.
    current: Option<(Instant, u32)>,
    n_left_out: u64,
}

impl LogLimit {
    /// A limit of `max_lines` lines (at least 1) per `interval`.
    pub fn new(max_lines: u32, interval: Duration) -> Self {
        Self { max_lines, interval, current: None, n_left_out: 0 }
    }

    /// Number of lines left out since the last admitted one, if the line of the time `now` is admitted; otherwise it is counted.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        match &mut self.current {
            Some((start, n_lines)) if now.duration_since(*start) < self.interval => {
                if *n_lines >= self.max_lines {
                    self.n_left_out += 1;
                    return None;
                }
                *n_lines += 1;
            }
            current => *current = Some((now, 1)),
        }
        Some(self.take_left_out())
    }

    /// Number of lines left out since the last admitted one, which are then not counted again.
    pub fn take_left_out(&mut self) -> u64 {
        std::mem::take(&mut self.n_left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_counted_until_the_next_interval() {
        let (mut limit, start) = (LogLimit::new(2, Duration::from_secs(1)), Instant::now());
        let mut at = |ms| limit.admit(start + Duration::from_millis(ms));
        assert_eq!([0, 10, 20, 999].map(&mut at), [Some(0), Some(0), None, None]);
        assert_eq!([1000, 1001, 1002].map(&mut at), [Some(2), Some(0), None]);
        assert_eq!(at(5000), Some(1));
        assert_eq!(limit.take_left_out(), 0);
    }
}
