//! Datasets: rows and records in files, splits, leaks between them, augmentation, dialogues, exported tables.

pub(crate) mod augment;
pub(crate) mod dialogues;
pub(crate) mod export;
pub(crate) mod leaks;
pub(crate) mod records;
pub(crate) mod splits;

/// Pseudorandom numbers from a seed.
///
/// Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators" (SplitMix64).
pub(crate) struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

#[cfg(test)]
mod tests;
