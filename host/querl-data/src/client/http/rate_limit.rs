//! Rate limits of an endpoint: requests and tokens a minute, and pauses that it requests with `Retry-After`.

use governor::clock::Clock;
use governor::{DefaultDirectRateLimiter, Quota};
use std::num::NonZeroU32;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Services count the last minute: a bucket holds the tokens of one second, so that no minute exceeds its quota by more than a
/// sixtieth.
#[derive(Debug, Default)]
pub(super) struct RateLimiter {
    requests: Option<TokenBucket>,
    tokens: Option<TokenBucket>,
    paused_until: Mutex<Option<Instant>>,
}

#[derive(Debug)]
struct TokenBucket {
    limiter: DefaultDirectRateLimiter,
    size: NonZeroU32,
    queue: tokio::sync::Mutex<()>,
}

impl TokenBucket {
    /// `None` where there is no quota.
    fn new(per_minute: Option<u32>) -> Option<Self> {
        let per_minute = NonZeroU32::new(per_minute?)?;
        let size = NonZeroU32::new(per_minute.get() / 60).unwrap_or(NonZeroU32::MIN);
        let limiter = governor::RateLimiter::direct(Quota::per_minute(per_minute).allow_burst(size));
        Some(Self { limiter, size, queue: tokio::sync::Mutex::new(()) })
    }

    async fn take(&self, n: u64) {
        let _turn = self.queue.lock().await;
        let mut n_left = n;
        while n_left > 0 {
            let n_now = NonZeroU32::new(n_left.min(u64::from(self.size.get())) as u32).unwrap_or(NonZeroU32::MIN);
            while let Ok(Err(not_until)) = self.limiter.check_n(n_now) {
                tokio::time::sleep(not_until.wait_time_from(self.limiter.clock().now())).await;
            }
            n_left -= u64::from(n_now.get());
        }
    }
}

impl RateLimiter {
    /// No quota where `None`.
    pub(super) fn new(requests_per_minute: Option<u32>, tokens_per_minute: Option<u32>) -> Self {
        let (requests, tokens) = (TokenBucket::new(requests_per_minute), TokenBucket::new(tokens_per_minute));
        Self { requests, tokens, paused_until: Mutex::default() }
    }

    /// Waits until a request of `n_tokens` is allowed.
    pub(super) async fn turn(&self, n_tokens: u64) {
        if let Some(requests) = &self.requests {
            requests.take(1).await;
        }
        if let Some(tokens) = &self.tokens {
            tokens.take(n_tokens).await;
        }
        while let Some(pause) = self.pause_left() {
            tokio::time::sleep(pause).await;
        }
    }

    pub(super) fn pause_all(&self, pause: Duration) {
        let until = Instant::now() + pause;
        let mut paused_until = self.paused_until.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *paused_until = Some(paused_until.map_or(until, |known| known.max(until)));
    }

    fn pause_left(&self) -> Option<Duration> {
        let paused_until = *self.paused_until.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        paused_until?.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }
}

/// Estimated number of tokens of a text: a Chinese character is about one, other characters are four to
/// a token. For quotas and for costs where a service does not say; marked as an estimate wherever shown.
pub(crate) fn estimated_tokens(text: &str) -> u64 {
    let (n_wide, n_narrow) = text
        .chars()
        .fold((0, 0), |(wide, narrow), c| if c >= '\u{2e80}' { (wide + 1, narrow) } else { (wide, narrow + 1) });
    n_wide + u64::div_ceil(n_narrow, 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_keep_the_pace_from_the_first_on() {
        let rate_limiter = RateLimiter::new(Some(600), None);
        let started = Instant::now();
        for _ in 0..16 {
            rate_limiter.turn(0).await;
        }
        // Ten at once, then one each tenth of a second.
        let taken = started.elapsed().as_secs_f64();
        assert!((0.55..2.0).contains(&taken), "{taken}");
    }

    #[tokio::test]
    async fn tokens_are_paid_by_size_even_above_the_bucket() {
        let rate_limiter = RateLimiter::new(None, Some(6000));
        let started = Instant::now();
        rate_limiter.turn(160).await;
        let taken = started.elapsed().as_secs_f64();
        assert!((0.55..2.0).contains(&taken), "{taken}");
    }

    #[tokio::test]
    async fn silence_holds_everybody() {
        let rate_limiter = RateLimiter::new(None, None);
        rate_limiter.pause_all(Duration::from_millis(200));
        rate_limiter.pause_all(Duration::from_millis(1));
        let started = Instant::now();
        rate_limiter.turn(0).await;
        assert!(started.elapsed() >= Duration::from_millis(195));
    }

    #[test]
    fn chinese_and_english_are_estimated_each_in_its_way() {
        assert_eq!((estimated_tokens("鱼油怎么吃"), estimated_tokens("fish oil"), estimated_tokens("")), (5, 2, 0));
    }
}
