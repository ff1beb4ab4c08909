//! Sequences with shared prefixes, and the golden models.

/// The golden decoders, one for each variant of the architecture.
pub(crate) const NAMES: [&str; 5] = ["qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied", "qwen3-bias"];

/// Sequences that branch at several depths, including a prefix of another one, a duplicate, and one of `longest` tokens without a shared
/// prefix. Index `.1` is the start of the response.
pub(crate) fn parting(longest: u32) -> Vec<(Vec<u32>, usize)> {
    let system = [5, 9, 2, 7];
    let join = |parts: &[&[u32]]| [&system[..], &parts.concat()].concat();
    vec![
        (join(&[&[11, 12, 13], &[21, 22, 23]]), 7),
        (join(&[&[11, 12, 13], &[21, 24]]), 7),
        (join(&[&[11, 12, 14, 15], &[31, 32, 33, 34]]), 8),
        (join(&[&[11, 12, 13], &[21, 22]]), 7),
        (vec![40, 41, 42, 43, 44], 2),
        (join(&[&[11, 12, 13], &[21, 24]]), 7),
        ((0..longest).map(|i| (i * 29 + 3) % 64).collect(), 20),
    ]
}
