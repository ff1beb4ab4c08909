//! What the suite sends to plugins: ordinary items, and odd ones that the contract allows. The id of an item says what is odd.

use querl_core::records::{CallFailure, FailureKind, Hit};

pub(crate) mod dialogues;
pub(crate) mod episodes;
pub(crate) mod prompts;
pub(crate) mod samples;

/// Edge-case items of one category.
#[derive(Debug, Clone)]
pub(crate) struct Group<T> {
    /// Name of the category: `texts`, `hits`.
    pub(crate) name: &'static str,
    pub(crate) items: Vec<T>,
}

/// `n` items with the ids `batch/0`, `batch/1` and so on, alternately ordinary ones and odd ones that are not long.
fn mixed<T: Clone>(
    n: usize,
    groups: Vec<Group<T>>,
    ordinary: impl Fn(String, usize) -> T,
    with_id: impl Fn(String, T) -> T,
) -> Vec<T> {
    let odd: Vec<T> = groups.into_iter().filter(|group| group.name != "long").flat_map(|group| group.items).collect();
    let item = |index: usize| match (index % 2, format!("batch/{index}")) {
        (0, id) => ordinary(id, index),
        (_, id) => with_id(id, odd[(index / 2 * 3) % odd.len()].clone()),
    };
    (0..n).map(item).collect()
}

pub(crate) fn failure(kind: FailureKind) -> CallFailure {
    CallFailure { kind, message: "知识库服务没有在30秒内回答".into() }
}

pub(crate) const PASSAGES: [&str; 5] = [
    "胶原蛋白肽每日一次，每次一袋，用温水冲服，早晚空腹服用吸收更好，开封后请尽快食用。",
    "虾青素软胶囊每日一粒，随餐服用；孕妇、哺乳期妇女及儿童不建议食用。",
    "深海鱼油含EPA与DHA，有助于维持血脂健康水平，不能代替药物。",
    "订单发出后可在“我的订单”中查看物流，一般三到五天送达，偏远地区顺延。",
    "辅酶Q10建议在医生指导下与他汀类药物一同服用，两次服用间隔两小时。",
];

/// Hits with these reranker scores; ranks start at 1.
pub(crate) fn hits(scores: &[f64]) -> Vec<Hit> {
    let hit = |(index, score): (usize, &f64)| Hit {
        id: format!("kb-{:03}", index + 1),
        text: PASSAGES[index % PASSAGES.len()].into(),
        reranker_score: *score,
        retrieval_score: Some(18.5 - index as f64),
        rank: index as u32 + 1,
    };
    scores.iter().enumerate().map(hit).collect()
}

/// `n` descending scores between 0 and 1, which depend on `seed`.
pub(crate) fn falling_scores(seed: usize, n: usize) -> Vec<f64> {
    let first = ((seed * 37 + 11) % 100) as f64 / 100.0;
    (0..n).map(|index| first * (1.0 - 0.9 * index as f64 / n as f64)).collect()
}

/// A fixed permutation of `items` that moves nearly all of them, with their original indices.
pub(crate) fn shuffled<T: Clone>(items: &[T]) -> (Vec<usize>, Vec<T>) {
    let n_items = items.len();
    let stride = (n_items / 2..n_items).find(|stride| greatest_common_divisor(*stride, n_items) == 1).unwrap_or(1);
    let places: Vec<_> = (0..n_items).map(|index| (index * stride + n_items / 3) % n_items).collect();
    let shuffled = places.iter().map(|place| items[*place].clone()).collect();
    (places, shuffled)
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Characters of 3 bytes each: about 100 kB.
const LONG_CHARS: usize = 34_000;

/// Edge-case texts with their names; each text has at most a few dozen bytes, unlike [`long_text`].
pub(crate) fn odd_texts() -> Vec<(&'static str, &'static str)> {
    vec![
        ("empty", ""),
        ("space", " "),
        ("whitespace", " \t\r\n\u{a0}\u{3000}"),
        ("one-character", "吃"),
        ("emoji", "👨‍👩‍👧‍👦能一起喝🍵吗❤️🇨🇳"),
        ("combining", "e\u{301}\u{327} ﾊﾟ か\u{3099} ก\u{e33}"),
        ("right-to-left", "كيف أتناول \u{202e}الكولاجين\u{202c}؟"),
        ("zero-width", "胶\u{200b}原\u{200d}蛋\u{2060}白\u{feff}"),
        ("nul", "胶原\0蛋白\0"),
        ("control", "\u{1}\u{7f}\u{85}\u{1b}[31m"),
        ("extension-b", "𠀀𪛖𫝀𬺰𰀀"),
        ("next-to-surrogates", "\u{d7ff}\u{e000}\u{fffd}\u{ffff}\u{10000}\u{10ffff}"),
        ("full-width", "ＤＨＡ　１００％（進口）"),
        ("json", "{\"rewritten_query\": \"胶原\", \"x\": [1, null]}"),
        ("markup", "<think>想</think>```json\n```\"'\\"),
        ("number", "-1e999"),
        ("not-a-number", "NaN"),
    ]
}

/// A question of about 100 kB.
pub(crate) fn long_text() -> String {
    "胶原蛋白肽和虾青素可以一起吃吗？".chars().cycle().take(LONG_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn shuffled_items_are_all_there_in_another_order() {
        for n_items in [1_usize, 2, 3, 6, 10, 64] {
            let items: Vec<_> = (0..n_items).collect();
            let (places, shuffled) = shuffled(&items);
            assert_eq!(shuffled.iter().collect::<BTreeSet<_>>().len(), n_items);
            assert_eq!(places, shuffled);
            assert!(n_items < 3 || shuffled != items, "{shuffled:?}");
        }
    }

    #[test]
    fn every_corpus_keeps_what_the_contract_promises_to_plugins() {
        let episodes = episodes::groups().into_iter().flat_map(|group| group.items).chain(episodes::batch(64));
        let mut ids = BTreeSet::new();
        for episode in episodes {
            // Not through a `Value`, which would sort the columns.
            let json = serde_json::to_string(&episode).unwrap();
            let line = format!(r#"{{"format": {}, "episode": {json}}}"#, querl_core::records::EpisodeRecord::FORMAT);
            let read = querl_core::episodes::parse(line.as_bytes(), 1);
            assert!(matches!(&read, Ok(Some(read)) if read.episode == episode), "{}: {read:?}", episode.id);
            assert!(ids.insert(episode.id.clone()), "{} appears twice", episode.id);
        }
        let dialogues = dialogues::groups().into_iter().flat_map(|group| group.items).chain(dialogues::batch(64));
        for dialogue in dialogues {
            assert!(dialogue.turns.last().is_some_and(|turn| turn.role == "assistant"), "{}", dialogue.id);
        }
        for batch in [samples::batch(64), samples::repeated(24)] {
            let ids: BTreeSet<_> = batch.iter().map(|sample| &sample.id).collect();
            assert_eq!(ids.len(), batch.len());
        }
    }
}
