//! Prompts with shared prefixes.

pub(crate) fn prompts() -> Vec<Vec<u32>> {
    let base: Vec<u32> = (0..19).map(|i| 3 + i * 5 % 40).collect();
    let branch = |own: &[u32]| [base.as_slice(), own].concat();
    vec![
        branch(&[50, 51, 52, 53, 54, 55, 1]),
        branch(&[50, 51, 52, 53, 54, 55, 2, 3]),
        branch(&[7]),
        vec![11],
        branch(&[8, 9]),
        base[..6].to_vec(),
        branch(&[7]),
        vec![60, 61, 62],
    ]
}
