//! Data augmentation of dialogues for the training of the style classifier.
//!
//! A copy has a changed answer: a sentence is deleted, two neighbouring sentences are swapped, or a twentieth of the characters is
//! deleted. The label is assumed to stay the same, so copies are for training only.

use crate::dataset::SplitMix64;
use querl_core::fsx::digest_hex;

/// Separates question and answer in the text of a dialogue.
const ANSWER: &str = "\n回答：";
const SENTENCE_ENDS: [char; 7] = ['。', '！', '？', '!', '?', '；', '\n'];
/// Fraction of the answer's characters that random deletion removes.
const DELETION_RATE: f64 = 0.05;
/// Attempts per copy; a short answer may have no further variant.
const ATTEMPTS: usize = 8;

/// Up to `n` distinct augmented copies of a dialogue's text, deterministic for a `seed`.
///
/// Source: random swap and random deletion of Wei and Zou 2019, "EDA: Easy Data Augmentation Techniques for Boosting Performance on Text
/// Classification Tasks", with sentences in place of words.
pub fn augmented(text: &str, n: usize, seed: u64) -> Vec<String> {
    let start = text.find(ANSWER).map_or(0, |at| at + ANSWER.len());
    let (question, answer) = text.split_at(start);
    let digest = digest_hex(format!("{seed} {text}").as_bytes());
    let mut rng = SplitMix64(u64::from_str_radix(&digest[..16], 16).expect("a digest is hexadecimal"));
    let mut copies: Vec<String> = Vec::new();
    for _ in 0..n * ATTEMPTS {
        if copies.len() == n {
            break;
        }
        let copy = format!("{question}{}", augmented_answer(answer, &mut rng));
        if copy != text && !copy[start..].trim().is_empty() && !copies.contains(&copy) {
            copies.push(copy);
        }
    }
    copies
}

fn augmented_answer(answer: &str, rng: &mut SplitMix64) -> String {
    let mut sentences: Vec<&str> = answer.split_inclusive(SENTENCE_ENDS).collect();
    match rng.below(3) {
        0 if sentences.len() >= 3 => drop(sentences.remove(rng.below(sentences.len()))),
        1 if sentences.len() >= 2 => {
            let first = rng.below(sentences.len() - 1);
            sentences.swap(first, first + 1);
        }
        _ => {
            return answer
                .chars()
                .filter(|_| (rng.next() >> 11) as f64 / (1u64 << 53) as f64 >= DELETION_RATE)
                .collect();
        }
    }
    sentences.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "用户问题：杯子碎了。怎么办？\n回答：很抱歉。请拍照发来。今天补发！";

    #[test]
    fn copies_keep_the_question_and_differ() {
        let copies = augmented(TEXT, 4, 42);
        assert_eq!(copies.len(), 4);
        for (index, copy) in copies.iter().enumerate() {
            assert!(copy.starts_with("用户问题：杯子碎了。怎么办？\n回答：") && copy != TEXT, "{copy}");
            assert!(!copies[..index].contains(copy));
        }
        assert_eq!(copies, augmented(TEXT, 4, 42));
        assert_ne!(copies, augmented(TEXT, 4, 43));
    }

    #[test]
    fn a_text_without_variants_has_no_copies() {
        assert!(augmented("好", 3, 1).is_empty());
    }
}
