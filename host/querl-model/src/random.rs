//! Counter-based normal random numbers: a value depends only on seed and index, so that initial weights do not depend on
//! sharding or order.

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use std::ops::Range;

/// Hash of a 64-bit number: mixes all its bits.
///
/// Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators" (`mix64` of SplitMix).
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Increment of SplitMix: 2^64 over the golden ratio, as an odd number.
pub const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

pub(crate) fn seed_of(seed: u64, name: &str) -> u64 {
    name.bytes().fold(mix(seed.wrapping_add(STEP)), |seed, byte| mix(seed.wrapping_add(STEP) ^ u64::from(byte)))
}

/// `n` normally distributed numbers times `scale` (Box and Muller); each pair of neighbours comes from one draw.
pub fn normal(n: usize, seed: u64, scale: f32) -> Vec<f32> {
    let mut values = vec![0.0; n];
    values.par_chunks_mut(2).enumerate().with_min_len(4096).for_each(|(pair, values)| {
        values.iter_mut().zip(normal_pair(pair as u64, seed, scale)).for_each(|(value, made)| *value = made);
    });
    values
}

/// The given rows and columns of a matrix with `width` columns that [`normal`] fills row by row.
pub fn normal_part(rows: Range<usize>, columns: Range<usize>, width: usize, seed: u64, scale: f32) -> Vec<f32> {
    let mut values = vec![0.0; rows.len() * columns.len()];
    values.par_chunks_mut(columns.len().max(1)).zip(rows).for_each(|(values, row)| {
        for (value, column) in values.iter_mut().zip(columns.clone()) {
            let index = (row * width + column) as u64;
            *value = normal_pair(index / 2, seed, scale)[index as usize % 2];
        }
    });
    values
}

fn normal_pair(pair: u64, seed: u64, scale: f32) -> [f32; 2] {
    let bits = mix(seed.wrapping_add((pair + 1).wrapping_mul(STEP)));
    // In (0, 1]; 24 bits are exact in f32.
    let u = ((bits >> 40) as f32 + 1.0) * 2f32.powi(-24);
    let angle = std::f32::consts::TAU * (((bits >> 8) & 0x00ff_ffff) as f32 * 2f32.powi(-24));
    let radius = scale * (-2.0 * u.ln()).sqrt();
    [radius * angle.cos(), radius * angle.sin()]
}

/// A standard normal value, by the Box-Muller transform.
pub(crate) fn standard_normal(rng: &mut ChaCha8Rng) -> f32 {
    let (u, v): (f32, f32) = (rng.random_range(f32::MIN_POSITIVE..1.0), rng.random_range(0.0..1.0));
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_normal_and_tensors_differ() {
        let values = normal(200_001, seed_of(7, "a.weight"), 0.5);
        let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / values.len() as f64;
        let moment = |k| values.iter().map(|x| f64::from(*x).powi(k)).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.005, "{mean}");
        assert!((moment(2) - 0.25).abs() < 0.003, "{}", moment(2));
        assert!((moment(4) / moment(2).powi(2) - 3.0).abs() < 0.06, "{}", moment(4));
        assert_ne!(seed_of(7, "a.weight"), seed_of(7, "b.weight"));
        assert_ne!(seed_of(7, "a.weight"), seed_of(8, "a.weight"));
    }

    #[test]
    fn a_part_of_a_matrix_equals_the_full_matrix_there() {
        let whole = normal(5 * 7, 3, 0.5);
        let (rows, columns) = (1..4, 2..7);
        let expected: Vec<f32> = rows.clone().flat_map(|row| &whole[row * 7 + 2..row * 7 + 7]).copied().collect();
        assert_eq!(normal_part(rows, columns, 7, 3, 0.5), expected);
    }
}
