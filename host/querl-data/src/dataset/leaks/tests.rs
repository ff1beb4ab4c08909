#![allow(clippy::unwrap_used)]

use super::candidates::next_random;
use super::*;
use std::time::{Duration, Instant};

fn row(row: usize, query: &str, history: &str) -> QueryRow {
    QueryRow {
        id: row.to_string(),
        row,
        original_query: query.into(),
        user_profile: String::new(),
        history_summary: history.into(),
        gold_ids: Vec::new(),
        group: row.to_string(),
    }
}

fn rows(texts: &[(&str, &str)]) -> Vec<QueryRow> {
    texts.iter().zip(2..).map(|((query, history), number)| row(number, query, history)).collect()
}

fn found(train: &Vec<QueryRow>, test: &Vec<QueryRow>, least: f64) -> Leaks {
    let [leaks] = find_leaks(train, [test], least, &mut |_| Ok::<_, DataError>(())).unwrap();
    leaks
}

fn leaked(train: &[(&str, &str)], test: &[(&str, &str)], least: f64) -> Vec<(usize, usize, f64)> {
    let leaks = found(&rows(train), &rows(test), least);
    assert_eq!((leaks.n_leaked, leaks.n_rows), (leaks.rows.len(), test.len()));
    leaks.rows.iter().map(|leak| (leak.row, leak.train_row, leak.similarity)).collect()
}

#[test]
fn rows_that_say_the_same_leak_and_other_histories_do_not() {
    let train = [("鱼油怎么吃？", "问过鱼油"), ("多少钱", ""), ("贵", "")];
    let test = [("鱼油怎么吃", "问过鱼油。"), ("鱼油怎么吃", "咨询益生菌"), ("多少钱！", ""), ("贵！", ""), ("廉", "")];
    assert_eq!(leaked(&train, &test, 0.8), [(2, 2, 1.0), (4, 3, 1.0), (5, 4, 1.0)]);
}

/// Regression: with profiles of single users every query of test could be in train without a report.
#[test]
fn queries_that_are_asked_in_train_after_another_history_are_counted_apart() {
    let train = rows(&[("鱼油怎么吃？", "问过鱼油"), ("多少钱", "")]);
    let test = rows(&[("鱼油怎么吃", "咨询益生菌"), ("多少钱！", ""), ("廉", "")]);
    let leaks = found(&train, &test, 0.8);
    assert_eq!((leaks.n_leaked, leaks.n_same_query), (1, 1), "a leak is not counted twice");
    let expected = "1 of 3 rows of test ask what a row of train asks, after another profile or history, and are no leaks: \
                    row 2 `鱼油怎么吃` is like row 2 `鱼油怎么吃？`";
    assert_eq!(leaks.same_query_sentence(Split::Test).unwrap(), expected);
}

#[test]
fn near_duplicates_leak_as_far_as_they_are_similar() {
    // 4 pairs of characters of 5.
    let (train, test) = ([("鱼油怎么吃", "")], [("鱼油怎么吃啊", "")]);
    assert_eq!(leaked(&train, &test, 0.8), [(2, 2, 0.8)]);
    assert_eq!(leaked(&train, &test, 0.81), []);
    assert_eq!(leaked(&[("深海鱼油怎么吃", "")], &[("益生菌怎么吃呢", "")], 0.8), []);
}

#[test]
fn only_rows_that_say_the_same_have_a_similarity_of_one() {
    let (train, test) = ([("哈哈", "")], [("哈哈哈", ""), ("哈哈！", "")]);
    assert_eq!(leaked(&train, &test, 0.8), [(2, 2, 0.99), (3, 2, 1.0)]);
    assert_eq!(leaked(&train, &test, 1.0), [(3, 2, 1.0)]);
}

fn random_text(seed: u32) -> String {
    let mut state = u64::from(seed);
    (0..24).map(|_| char::from_u32(0x4e00 + (next_random(&mut state) % 3000) as u32).unwrap()).collect()
}

/// Of 2000 pairs at a similarity of 0.83 to 0.9 nearly all must be found.
#[test]
fn few_near_duplicates_are_missed() {
    let train: Vec<QueryRow> = (0..2000).map(|seed| row(seed as usize, &random_text(seed), "")).collect();
    let changed = |seed: u32| {
        random_text(seed).chars().enumerate().map(|(at, c)| if at == 11 { '改' } else { c }).collect::<String>()
    };
    let test: Vec<QueryRow> = (0..2000).map(|seed| row(seed as usize, &changed(seed), "")).collect();
    let leaks = found(&train, &test, 0.8);
    assert!(leaks.n_leaked >= 1990, "{}", leaks.n_leaked);
    assert!(leaks.rows.len() == MAX_LISTED && leaks.rows.iter().all(|leak| leak.row == leak.train_row));
    let sentence = leaks.sentence(Split::Test).unwrap();
    assert!(sentence.contains("of 2000 rows of test are in train, or nearly: row 0 `"), "{sentence}");
    assert_eq!(Leaks::default().sentence(Split::Test), None);
}

/// Regression: bands made of a profile that thousands of rows share, so that a row is compared with the first few only.
#[test]
fn a_context_that_all_rows_share_hides_no_near_duplicate() {
    let context: String = (0..60).map(random_text).collect();
    let changed = |seed: u32| random_text(seed).replacen(random_text(seed).chars().nth(11).unwrap(), "改", 1);
    let train: Vec<QueryRow> = (0..1000).map(|seed| row(seed as usize, &random_text(seed + 100), &context)).collect();
    let test: Vec<QueryRow> = (0..1000).map(|seed| row(seed as usize, &changed(seed + 100), &context)).collect();
    let leaks = found(&train, &test, 0.8);
    assert!(leaks.n_leaked >= 990, "{}", leaks.n_leaked);
}

/// One text with another number in each row.
fn template(numbers: std::ops::Range<usize>) -> Vec<QueryRow> {
    let text = |n: usize| {
        format!(
            "请问我上个星期天在你们旗舰店里买给家里老人吃的那两瓶深海鱼油软胶囊究竟什么时候才能从仓库发货已经等了很久订单编号是第{n}位顾客"
        )
    };
    numbers.map(|n| row(n, &text(n), "")).collect()
}

/// Regression: half a second a training row, and days for a large table.
#[test]
fn texts_of_one_template_take_no_longer_than_others() {
    let (train, test) = (template(0..2000), template(500_000..520_000));
    for least in [0.8, 0.95] {
        let start = Instant::now();
        let leaks = found(&train, &test, least);
        // Compared pair by pair this takes minutes.
        assert!(start.elapsed() < Duration::from_secs(20), "{:?} at {least}", start.elapsed());
        assert_eq!(leaks.n_leaked > 10_000, least == 0.8, "{}", leaks.n_leaked);
    }
    let same = [template(0..2000), template(500_777..500_778)].concat();
    assert_eq!(found(&same, &test, 1.0).rows[0].row, 500_777, "one that says the same is found among thousands");
}

#[test]
fn several_splits_are_found_in_one_reading_and_a_caller_may_break_off() {
    let train = rows(&[("鱼油怎么吃", ""), ("多少钱", "")]);
    let (val, test) = (rows(&[("多少钱", "")]), rows(&[("贵", ""), ("鱼油怎么吃", "")]));
    let [of_val, of_test] = find_leaks(&train, [&val, &test], 0.8, &mut |_| Ok::<_, DataError>(())).unwrap();
    assert_eq!((of_val.n_rows, of_val.n_leaked, of_test.n_rows, of_test.n_leaked), (1, 1, 2, 1));
    assert_eq!((of_test.rows[0].row, of_test.rows[0].train_row), (3, 2));
    let many: Vec<QueryRow> = (0..3000).map(|seed| row(seed as usize, &random_text(seed), "")).collect();
    let mut reported = Vec::new();
    let mut watch = |n_read| {
        reported.push(n_read);
        if n_read < 2048 { Ok(()) } else { Err(DataError::setting("the caller", "was interrupted")) }
    };
    assert!(find_leaks(&many, [&val], 0.8, &mut watch).is_err());
    assert_eq!(reported, [1024, 2048]);
}

#[test]
fn a_long_query_is_cut_in_a_sentence_and_stays_on_its_line() {
    let text = "第一行\n".to_owned() + &"鱼".repeat(200);
    let leaks = found(&rows(&[(&text, "")]), &rows(&[(&text, "")]), 0.8);
    let sentence = leaks.sentence(Split::Test).unwrap();
    assert!(
        sentence.contains("`第一行\\n鱼") && sentence.contains("鱼…`") && sentence.chars().count() < 200,
        "{sentence}"
    );
    assert_eq!(leaks.rows[0].query, text, "JSON has it whole");
}
