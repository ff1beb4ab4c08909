use super::*;
use crate::client::{ServiceContext, within_deadline};
use futures::FutureExt;
use futures::future::{join_all, pending, ready};
use querl_core::records::FailureKind;
use std::sync::atomic::AtomicUsize;

fn open(path: &Path) -> ResponseCache {
    ResponseCache::open(path, CacheLimits::default()).unwrap()
}

fn put(path: &Path, key: &str, response: &[u8]) {
    open(path).put(CacheTable::Rewrites, key, response.to_vec());
}

fn get(path: &Path, key: &str) -> Option<Vec<u8>> {
    open(path).get(CacheTable::Rewrites, key, None)
}

#[test]
fn responses_are_found_in_their_table_until_removed_or_expired() {
    let (_folder, path) = crate::scratch_file("deep/answers.redb");
    put(&path, "a", b"one");
    let cache = open(&path);
    assert_eq!(cache.get(CacheTable::Rewrites, "a", Some(Duration::from_secs(3600))).as_deref(), Some(&b"one"[..]));
    assert_eq!(cache.get(CacheTable::Judgements, "a", None), None);
    assert_eq!(cache.get(CacheTable::Rewrites, "b", None), None);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(cache.get(CacheTable::Rewrites, "a", Some(Duration::from_millis(50))), None, "too old");
    cache.forget(CacheTable::Rewrites, "a");
    drop(cache);
    assert_eq!(get(&path, "a"), None);
}

#[test]
fn a_cache_in_use_is_not_opened() {
    let (_folder, path) = crate::scratch_file("answers.redb");
    let first = open(&path);
    assert!(ResponseCache::open(&path, CacheLimits::default()).is_none());
    assert!(cache_stats(&path).unwrap_err().to_string().ends_with("another process uses this cache; wait for its end"));
    drop(first);
    assert!(ResponseCache::open(&path, CacheLimits::default()).is_some());
}

/// Regression: a run made every call again because `querl estimate` had the cache open when it started.
#[test]
fn opening_waits_for_a_reader() {
    let (_folder, path) = crate::scratch_file("answers.redb");
    put(&path, "a", b"one");
    let reader = ResponseCache::open_for_reading(&path).unwrap();
    let run = std::thread::scope(|scope| {
        let run = scope.spawn(|| get(&path, "a"));
        std::thread::sleep(Duration::from_millis(300));
        drop(reader);
        run.join().unwrap()
    });
    assert_eq!(run.as_deref(), Some(&b"one"[..]));
}

#[test]
fn stats_count_entries_and_clearing_empties_the_given_tables() {
    let (_folder, path) = crate::scratch_file("answers.redb");
    assert_eq!(cache_stats(&path).unwrap(), []);
    put(&path, "a", b"one");
    put(&path, "b", b"two");
    let of_rewrites = || cache_stats(&path).unwrap()[0];
    assert_eq!((of_rewrites().table, of_rewrites().n_answers), (CacheTable::Rewrites, 2));
    assert!(of_rewrites().oldest_s.is_some());
    clear_cache(&path, &[CacheTable::Judgements]).unwrap();
    assert_eq!(of_rewrites().n_answers, 2);
    clear_cache(&path, &CacheTable::ALL).unwrap();
    assert_eq!((of_rewrites().n_answers, of_rewrites().oldest_s), (0, None));
}

/// With damage anywhere in the file, opening and using it neither panics nor returns a wrong response.
#[test]
fn a_damaged_cache_never_panics_and_never_returns_wrong_data() {
    let (folder, whole) = crate::scratch_file("whole.redb");
    for n in 0..40 {
        put(&whole, &format!("key {n}"), format!("answer {n}").repeat(20).as_bytes());
    }
    let bytes = std::fs::read(&whole).unwrap();
    let mut n_renamed = 0;
    let damages: Vec<Vec<u8>> = (0..40)
        .map(|n| {
            let mut damaged = bytes.clone();
            let at = n * bytes.len() / 40;
            let end = (at + 300).min(bytes.len());
            damaged[at..end].iter_mut().for_each(|byte| *byte ^= 0x5a);
            damaged
        })
        .chain([b"not a database".to_vec(), bytes[..bytes.len() / 2].to_vec(), bytes[..100].to_vec()])
        .collect();
    for (n_damage, damaged) in damages.into_iter().enumerate() {
        // A database whose closing panicked holds its lock until the process ends: each damage has a file of its own.
        let path = folder.path().join(format!("answers-{n_damage}.redb"));
        std::fs::write(&path, &damaged).unwrap();
        let cache = open(&path);
        for n in 0..40 {
            let answer = cache.get(CacheTable::Rewrites, &format!("key {n}"), None);
            let right = format!("answer {n}").repeat(20).into_bytes();
            assert!(answer.is_none_or(|answer| answer == right));
        }
        cache.put(CacheTable::Rewrites, "new", b"new".to_vec());
        drop(cache);
        for entry in std::fs::read_dir(folder.path()).unwrap().flatten() {
            if entry.file_name().to_string_lossy().contains("damaged") {
                n_renamed += 1;
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
    }
    assert!(n_renamed >= 3, "{n_renamed}");
}

/// Regression: the cache of all runs was renamed because the disk was full for a moment.
#[test]
fn an_unavailable_file_is_not_renamed() {
    let (folder, path) = crate::scratch_file("answers.redb");
    put(&path, "a", b"one");
    for (store_error, n_files) in
        [(StoreError::Unavailable("no space left".into()), 1), (StoreError::Damaged("bad page".into()), 1)]
    {
        let is_broken = AtomicBool::new(false);
        give_up(&is_broken, &path, &store_error);
        assert!(is_broken.load(Ordering::SeqCst));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), n_files);
        assert_eq!(path.exists(), matches!(store_error, StoreError::Unavailable(_)), "{store_error:?}");
    }
}

/// Regression: a query table configured as the cache by mistake was renamed and replaced by a database.
#[test]
fn a_file_of_another_type_is_not_touched() {
    let (folder, path) = crate::scratch_file("precious.jsonl");
    std::fs::write(&path, "{\"original_query\": \"鱼油\"}\n").unwrap();
    assert!(ResponseCache::open(&path, CacheLimits::default()).is_none());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    assert!(std::fs::read_to_string(&path).unwrap().starts_with('{'));
}

#[test]
fn reading_changes_nothing() {
    let (_folder, path) = crate::scratch_file("answers.redb");
    assert!(ResponseCache::open_for_reading(&path).is_none());
    assert!(!path.exists());
    put(&path, "a", b"one");
    let before = std::fs::read(&path).unwrap();
    let cache = ResponseCache::open_for_reading(&path).unwrap();
    assert_eq!(cache.get(CacheTable::Rewrites, "a", None).as_deref(), Some(&b"one"[..]));
    cache.put(CacheTable::Rewrites, "b", b"two".to_vec());
    assert_eq!(cache.get(CacheTable::Rewrites, "b", None), None);
    drop(cache);
    assert!(std::fs::read(&path).unwrap() == before);
    std::fs::write(&path, "not a database").unwrap();
    assert!(ResponseCache::open_for_reading(&path).is_none());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "not a database");
}

/// Regression: the file grew without limit.
#[test]
fn above_its_limit_expired_and_then_the_oldest_entries_are_removed() {
    let (_folder, path) = crate::scratch_file("answers.redb");
    let limits = |max_bytes, retrieval_ttl| CacheLimits { max_bytes, retrieval_ttl };
    let day = Duration::from_secs(86_400);
    let put_sized = |table, key: &str, n_bytes| {
        ResponseCache::open(&path, limits(u64::MAX, day)).unwrap().put(table, key, vec![b'x'; n_bytes]);
        std::thread::sleep(Duration::from_millis(1100));
    };
    put_sized(CacheTable::Rewrites, "oldest", 1000);
    put_sized(CacheTable::Retrievals, "dead", 3000);
    put_sized(CacheTable::Rewrites, "older", 1000);
    put_sized(CacheTable::Judgements, "new", 1000);
    let left = |limits: CacheLimits| {
        drop(ResponseCache::open(&path, limits).unwrap());
        let cache = ResponseCache::open_for_reading(&path).unwrap();
        let entries = [
            (CacheTable::Rewrites, "oldest"),
            (CacheTable::Retrievals, "dead"),
            (CacheTable::Rewrites, "older"),
            (CacheTable::Judgements, "new"),
        ];
        entries.map(|(table, key)| cache.get(table, key, None).is_some())
    };
    assert_eq!(left(limits(8000, Duration::ZERO)), [true; 4], "there is room");
    assert_eq!(left(limits(6000, Duration::ZERO)), [true, false, true, true]);
    assert_eq!(left(limits(2500, day)), [false, false, false, true]);
}

/// Regression: a request was paid for again between its response and the write to disk.
#[test]
fn responses_are_found_in_the_queue_until_they_are_on_disk() {
    let queue = WriteQueue::default();
    let found = |key: &str| queue.get(CacheTable::Rewrites, key);
    queue.put(CacheTable::Rewrites, "a", Some(b"one".to_vec()));
    assert_eq!(found("a"), Some(Some(b"one".to_vec())));
    assert_eq!(queue.next().unwrap().len(), 1);
    assert_eq!(found("a"), Some(Some(b"one".to_vec())), "being written");
    queue.put(CacheTable::Rewrites, "a", None);
    assert_eq!(found("a"), Some(None), "the later change counts");
    queue.close();
    assert_eq!(queue.next().unwrap().len(), 1);
    assert!(queue.next().is_none());
    assert_eq!(found("a"), None);
}

fn join(in_flight: &InFlightRequests) -> InFlightRequest<'_> {
    in_flight.join(CacheTable::Judgements, "a")
}

fn down() -> CallFailure {
    CallFailure { kind: FailureKind::Unreachable, message: "down".into() }
}

#[tokio::test]
async fn one_call_is_made_and_all_get_its_outcome() {
    let in_flight = InFlightRequests::default();
    for outcome in [Ok(b"one".to_vec()), Err(down())] {
        let (first, second) = (join(&in_flight), join(&in_flight));
        assert_eq!(first.response(ready(outcome.clone())).await, &outcome);
        assert_eq!(second.response(async { unreachable!() }).await, &outcome);
        drop((first, second));
    }
    assert!(in_flight.entries().is_empty());
}

/// Regression: waiting callers got no response because the deadline of the caller that made the call passed.
#[tokio::test]
async fn the_next_waiting_caller_makes_the_call_if_the_first_is_cancelled() {
    let in_flight = InFlightRequests::default();
    let (first, second) = (join(&in_flight), join(&in_flight));
    let mut given_up = Box::pin(first.response(pending()));
    assert!(given_up.as_mut().now_or_never().is_none());
    let mut waiting = Box::pin(second.response(ready(Ok(Vec::new()))));
    assert!(waiting.as_mut().now_or_never().is_none());
    drop(given_up);
    drop(first);
    assert_eq!(waiting.await, &Ok(Vec::new()));
    drop(second);
    assert!(in_flight.entries().is_empty());
}

#[tokio::test]
async fn the_same_key_of_another_table_is_another_request() {
    let in_flight = InFlightRequests::default();
    let (first, second) = (join(&in_flight), in_flight.join(CacheTable::Rewrites, "a"));
    assert!(first.response(pending()).now_or_never().is_none());
    assert!(second.response(ready(Err(down()))).now_or_never().is_some());
}

/// A slow service behind a cache; it responds with the number of the cservice.
struct SlowService {
    services: ServiceContext,
    cache: ServiceCache,
    n_calls: AtomicUsize,
}

impl SlowService {
    fn new(services: ServiceContext) -> Self {
        let cache = ServiceCache::open(&services, CacheTable::Retrievals, "retrieval", &"slow");
        Self { services, cache, n_calls: AtomicUsize::new(0) }
    }

    /// The number of the call whose response is returned, or the failure's message.
    async fn request(&self, query: &str) -> String {
        let call = async {
            let n = self.n_calls.fetch_add(1, Ordering::SeqCst) + 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
            match query {
                "down" => Err(CallFailure { kind: FailureKind::Unreachable, message: format!("call {n}") }),
                _ => Ok(n.to_string()),
            }
        };
        self.cache.get_or_call(&query, call).await.unwrap_or_else(|failure| failure.message)
    }

    fn n_calls(&self) -> usize {
        self.n_calls.load(Ordering::SeqCst)
    }

    /// Numbers of cached and of shared responses.
    fn counted(&self) -> (u64, u64) {
        let spent = self.services.spend_tracker().of_stage("");
        (spent.cached, spent.joined)
    }
}

/// Regression: a request was paid for twice because it was repeated before its response arrived.
#[tokio::test]
async fn concurrent_identical_requests_are_paid_once() {
    let service = SlowService::new(ServiceContext::default());
    let answers = join_all(["a", "b", "a", "a"].map(|query| service.request(query))).await;
    assert_eq!(answers, ["1", "2", "1", "1"]);
    assert_eq!((service.n_calls(), service.counted()), (2, (0, 2)));
    assert_eq!(service.request("a").await, "3", "nothing is stored without a cache file");
}

/// Regression: an episode was dropped as late while it waited for the slow call of another caller.
#[tokio::test]
async fn a_deadline_excludes_the_wait_for_another_callers_request() {
    let service = SlowService::new(ServiceContext::default());
    let second = async {
        tokio::time::sleep(Duration::from_millis(5)).await;
        within_deadline(Duration::from_millis(10), service.request("a")).await
    };
    assert_eq!(tokio::join!(service.request("a"), second), ("1".to_owned(), Some("1".to_owned())));
    let cut_off = within_deadline(Duration::from_millis(10), service.request("a"));
    let next = within_deadline(Duration::from_secs(10), service.request("a"));
    assert_eq!(tokio::join!(cut_off, next), (None, Some("3".to_owned())));
}

#[tokio::test]
async fn a_failure_is_shared_but_not_stored() {
    let service = SlowService::new(ServiceContext::default());
    assert_eq!(join_all(["down", "down"].map(|query| service.request(query))).await, ["call 1", "call 1"]);
    assert_eq!(service.request("down").await, "call 2");
    assert_eq!(service.counted(), (0, 0));
}

/// Regression: a response was not found before it was written to disk.
#[tokio::test]
async fn a_response_is_cached_before_it_is_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Arc::new(open(&folder.path().join("answers.redb")));
    let service = SlowService::new(ServiceContext::default().with_cache(cache, Duration::from_secs(60)));
    for n in 1..=5 {
        let query = format!("query {n}");
        assert_eq!(service.request(&query).await, n.to_string());
        assert_eq!(service.request(&query).await, n.to_string());
    }
    assert_eq!((service.n_calls(), service.counted()), (5, (5, 0)));
}

/// Regression: `--from validate` after a change of the knowledge base returned the old hits.
#[tokio::test]
async fn fresh_retrievals_ignore_older_responses() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Arc::new(open(&folder.path().join("answers.redb")));
    let services = ServiceContext::default().with_cache(cache, Duration::from_secs(60));
    let before = SlowService::new(services.clone());
    assert_eq!(before.request("a").await, "1");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let fresh = SlowService::new(services.with_fresh_retrievals());
    assert_eq!((fresh.request("a").await, fresh.n_calls()), ("1".into(), 1));
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!((fresh.request("a").await, fresh.n_calls()), ("1".into(), 1));
}

#[tokio::test]
async fn the_second_caller_gets_a_response_if_the_first_times_out() {
    let service = SlowService::new(ServiceContext::default());
    let (first, second) = (tokio::time::timeout(Duration::from_millis(10), service.request("a")), service.request("a"));
    let (first, second) = tokio::join!(first, second);
    assert!(first.is_err());
    assert_eq!((second.as_str(), service.n_calls()), ("2", 2));
}

mod properties {
    use super::*;
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(crate::properties(24))]

        #[test]
        fn responses_are_read_back_and_a_cut_file_has_no_wrong_ones(
            entries in btree_map(".{0,40}", vec(any::<u8>(), 0..300), 1..6), cut in any::<prop::sample::Index>(),
        ) {
            let (folder, path) = crate::scratch_file("answers.redb");
            let cache = open(&path);
            entries.iter().for_each(|(key, value)| cache.put(CacheTable::Judgements, key, value.clone()));
            drop(cache);
            let cache = open(&path);
            for (key, value) in &entries {
                prop_assert_eq!(cache.get(CacheTable::Judgements, key, None), Some(value.clone()));
            }
            drop(cache);
            let bytes = std::fs::read(&path).unwrap();
            // A database whose closing panicked holds its lock until the process ends: the cut has a file of its own.
            let path = folder.path().join("cut.redb");
            let kept = &bytes[..cut.index(bytes.len())];
            std::fs::write(&path, kept).unwrap();
            let copy = folder.path().join("copy.redb");
            std::fs::write(&copy, kept).unwrap();
            match cache_stats(&copy) {
                Ok(stats) => {
                    prop_assert!(stats.iter().all(|table| table.n_answers <= entries.len() as u64), "{stats:?}");
                }
                Err(error) => prop_assert!(error.to_string().contains("copy.redb"), "{error}"),
            }
            if let Some(cache) = ResponseCache::open(&path, CacheLimits::default()) {
                for (key, value) in &entries {
                    prop_assert!(cache.get(CacheTable::Judgements, key, None).is_none_or(|found| found == *value));
                }
            }
        }
    }
}
