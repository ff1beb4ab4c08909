//! Dialogues for style scorers.

use super::{Group, PASSAGES, long_text, mixed, odd_texts};
use querl_core::records::{Dialogue, Message};

fn turn(role: &str, content: impl Into<String>) -> Message {
    Message { role: role.into(), content: content.into() }
}

/// A dialogue of two turns each of user and assistant.
pub(crate) fn ordinary(id: impl Into<String>, seed: usize) -> Dialogue {
    let turns = vec![
        turn("user", format!("胶原蛋白肽咋吃（{seed}）")),
        turn("assistant", PASSAGES[seed % PASSAGES.len()]),
        turn("user", "孕妇能吃吗"),
        turn("assistant", format!("亲，{}", PASSAGES[(seed + 1) % PASSAGES.len()])),
    ];
    Dialogue { id: id.into(), turns }
}

pub(crate) fn ordinary_batch(n: usize) -> Vec<Dialogue> {
    (0..n).map(|index| ordinary(format!("dialogue-{index:04}"), index)).collect()
}

/// `n` dialogues, alternately ordinary ones and edge cases.
pub(crate) fn batch(n: usize) -> Vec<Dialogue> {
    mixed(n, groups(), ordinary, |id, odd| Dialogue { id, ..odd })
}

pub(crate) fn groups() -> Vec<Group<Dialogue>> {
    vec![
        Group { name: "texts", items: with_texts() },
        Group { name: "long", items: with_long_texts() },
        Group { name: "turns", items: with_turns() },
    ]
}

fn with_texts() -> Vec<Dialogue> {
    let everywhere = |(name, text): (&'static str, &str)| Dialogue {
        id: name.into(),
        turns: vec![turn("user", text), turn("assistant", text)],
    };
    let answer_only = |(name, text): (&'static str, &str)| Dialogue {
        id: format!("answer-{name}"),
        turns: vec![turn("user", "胶原蛋白肽咋吃"), turn("assistant", text)],
    };
    let odd = odd_texts();
    odd.iter().copied().map(everywhere).chain(odd.iter().copied().map(answer_only)).collect()
}

fn with_long_texts() -> Vec<Dialogue> {
    let of = |id: &str, user: String, assistant: String| Dialogue {
        id: id.into(),
        turns: vec![turn("user", user), turn("assistant", assistant)],
    };
    vec![of("long-question", long_text(), "好".into()), of("long-answer", "好".into(), long_text())]
}

fn with_turns() -> Vec<Dialogue> {
    let of = |id: &str, turns: Vec<Message>| Dialogue { id: id.into(), turns };
    let hundred = (0..50).flat_map(|_| [turn("user", "在吗"), turn("assistant", "亲，在的")]);
    vec![
        of("answer-alone", vec![turn("assistant", "亲，有什么可以帮您")]),
        of("with-system", vec![turn("system", "你是客服"), turn("user", "在吗"), turn("assistant", "在")]),
        of("assistant-twice", vec![turn("user", "在吗"), turn("assistant", "在"), turn("assistant", "请讲")]),
        of("hundred-turns", hundred.collect()),
    ]
}
