//! Augmentation of dialogues for training.
//!
//! The answer is changed: a sentence is deleted, two neighbours are swapped, or a twentieth of the characters is deleted. The label is
//! assumed to stay, so that copies are for training only, never for evaluation.

use querl_core::fsx::digest_hex;

/// Separates question and answer in the text of a dialogue.
const ANSWER: &str = "\n回答：";
const SENTENCE_ENDS: [char; 7] = ['。', '！', '？', '!', '?', '；', '\n'];
/// Share of an answer's characters.
const DELETION_RATE: f64 = 0.05;
/// Attempts for each copy; a short answer may have no further variant.
const ATTEMPTS: usize = 8;

/// At most `n` copies of a text, unlike it and each other; the same for the same seed.
///
/// Source: random swap and random deletion of Wei and Zou 2019, "EDA: Easy Data Augmentation Techniques for Boosting Performance on Text
/// Classification Tasks", with sentences in place of words.
pub fn augmented(text: &str, n: usize, seed: u64) -> Vec<String> {
    let start = text.find(ANSWER).map_or(0, |at| at + ANSWER.len());
    let (question, answer) = text.split_at(start);
    let mut rng = SplitMix64::new(text, seed);
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
        _ => return answer.chars().filter(|_| rng.unit() >= DELETION_RATE).collect(),
    }
    sentences.concat()
}

/// Numbers that follow from a text and a seed.
///
/// Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators" (SplitMix64).
struct SplitMix64(u64);

impl SplitMix64 {
    fn new(text: &str, seed: u64) -> Self {
        let digest = digest_hex(format!("{seed} {text}").as_bytes());
        Self(u64::from_str_radix(&digest[..16], 16).expect("a digest is hexadecimal"))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
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
    fn of_a_text_that_cannot_be_changed_there_is_no_copy() {
        assert!(augmented("好", 3, 1).is_empty());
    }
}
