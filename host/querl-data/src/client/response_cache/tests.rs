#![allow(clippy::unwrap_used)]

use super::*;

fn keep(path: &Path, key: &str, answer: &[u8]) {
    ResponseCache::open(path, CacheLimits::default()).unwrap().put(CacheTable::Rewrites, key, answer.to_vec());
}

fn found(path: &Path, key: &str) -> Option<Vec<u8>> {
    ResponseCache::open(path, CacheLimits::default()).unwrap().get(CacheTable::Rewrites, key, None)
}

#[test]
fn answers_are_found_again_in_their_own_table_until_they_are_forgotten_or_old() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/answers.redb");
    keep(&path, "a", b"one");
    let cache = ResponseCache::open(&path, CacheLimits::default()).unwrap();
    assert_eq!(cache.get(CacheTable::Rewrites, "a", Some(Duration::from_secs(3600))).as_deref(), Some(&b"one"[..]));
    assert_eq!(cache.get(CacheTable::Judgements, "a", None), None);
    assert_eq!(cache.get(CacheTable::Rewrites, "b", None), None);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(cache.get(CacheTable::Rewrites, "a", Some(Duration::from_millis(50))), None, "too old");
    cache.forget(CacheTable::Rewrites, "a");
    drop(cache);
    assert_eq!(found(&path, "a"), None);
}

#[test]
fn second_user_of_a_cache_works_without_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answers.redb");
    let first = ResponseCache::open(&path, CacheLimits::default()).unwrap();
    assert!(ResponseCache::open(&path, CacheLimits::default()).is_none());
    assert!(cache_stats(&path).unwrap_err().to_string().ends_with("another process uses this cache; wait for its end"));
    drop(first);
    assert!(ResponseCache::open(&path, CacheLimits::default()).is_some());
}

/// Regression: a run that pays for all that it knows, since an estimate looked into the cache as it began.
#[test]
fn who_only_looks_things_up_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answers.redb");
    keep(&path, "a", b"one");
    let reader = ResponseCache::open_for_reading(&path).unwrap();
    let run = std::thread::scope(|scope| {
        let run = scope.spawn(|| found(&path, "a"));
        std::thread::sleep(Duration::from_millis(300));
        drop(reader);
        run.join().unwrap()
    });
    assert_eq!(run.as_deref(), Some(&b"one"[..]));
}

#[test]
fn stats_count_and_clearing_empties_what_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answers.redb");
    assert_eq!(cache_stats(&path).unwrap(), []);
    keep(&path, "a", b"one");
    keep(&path, "b", b"two");
    let of_rewrites = || cache_stats(&path).unwrap()[0];
    assert_eq!((of_rewrites().table, of_rewrites().n_answers), (CacheTable::Rewrites, 2));
    assert!(of_rewrites().oldest_s.is_some());
    clear_cache(&path, &[CacheTable::Judgements]).unwrap();
    assert_eq!(of_rewrites().n_answers, 2);
    clear_cache(&path, &CacheTable::ALL).unwrap();
    assert_eq!((of_rewrites().n_answers, of_rewrites().oldest_s), (0, None));
}

/// Wherever a file is damaged, opening and using it neither crashes nor gives a wrong answer; most damage begins a new file.
#[test]
fn damaged_cache_never_crashes_and_never_lies() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole.redb");
    for n in 0..40 {
        keep(&whole, &format!("key {n}"), format!("answer {n}").repeat(20).as_bytes());
    }
    let bytes = std::fs::read(&whole).unwrap();
    let mut n_put_aside = 0;
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
        let cache = ResponseCache::open(&path, CacheLimits::default()).unwrap();
        for n in 0..40 {
            let answer = cache.get(CacheTable::Rewrites, &format!("key {n}"), None);
            let right = format!("answer {n}").repeat(20).into_bytes();
            assert!(answer.is_none_or(|answer| answer == right));
        }
        cache.put(CacheTable::Rewrites, "new", b"new".to_vec());
        drop(cache);
        for entry in std::fs::read_dir(folder.path()).unwrap().flatten() {
            if entry.file_name().to_string_lossy().contains("damaged") {
                n_put_aside += 1;
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
    }
    assert!(n_put_aside >= 3, "{n_put_aside}");
}

/// Regression: answers of all runs out of reach, since the disk was full for a moment.
#[test]
fn trouble_of_the_place_leaves_the_file_where_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answers.redb");
    keep(&path, "a", b"one");
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

/// Regression: a table of queries, named as the cache by mistake, that is renamed and has a database in its place.
#[test]
fn a_file_of_another_kind_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("precious.jsonl");
    std::fs::write(&path, "{\"original_query\": \"鱼油\"}\n").unwrap();
    assert!(ResponseCache::open(&path, CacheLimits::default()).is_none());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    assert!(std::fs::read_to_string(&path).unwrap().starts_with('{'));
}

#[test]
fn looking_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answers.redb");
    assert!(ResponseCache::open_for_reading(&path).is_none());
    assert!(!path.exists());
    keep(&path, "a", b"one");
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

/// Regression: a file of all runs that grows without end.
#[test]
fn above_its_limit_the_cache_forgets_what_is_too_old_and_then_the_oldest() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answers.redb");
    let limits = |most_bytes, retrieval_ttl| CacheLimits { most_bytes, retrieval_ttl };
    let day = Duration::from_secs(86_400);
    let put = |table, key: &str, n_bytes| {
        ResponseCache::open(&path, limits(u64::MAX, day)).unwrap().put(table, key, vec![b'x'; n_bytes]);
        std::thread::sleep(Duration::from_millis(1100));
    };
    put(CacheTable::Rewrites, "oldest", 1000);
    put(CacheTable::Retrievals, "dead", 3000);
    put(CacheTable::Rewrites, "older", 1000);
    put(CacheTable::Judgements, "new", 1000);
    let left = |limits: CacheLimits| {
        drop(ResponseCache::open(&path, limits).unwrap());
        let cache = ResponseCache::open_for_reading(&path).unwrap();
        let places = [
            (CacheTable::Rewrites, "oldest"),
            (CacheTable::Retrievals, "dead"),
            (CacheTable::Rewrites, "older"),
            (CacheTable::Judgements, "new"),
        ];
        places.map(|(table, key)| cache.get(table, key, None).is_some())
    };
    assert_eq!(left(limits(8000, Duration::ZERO)), [true; 4], "there is room");
    assert_eq!(left(limits(6000, Duration::ZERO)), [true, false, true, true]);
    assert_eq!(left(limits(2500, day)), [false, false, false, true]);
}

/// Regression: a question paid for again in the moment between its answer and the write to disk.
#[test]
fn answers_are_found_until_the_writer_says_that_they_are_on_disk() {
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
