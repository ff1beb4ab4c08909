//! NaN and Inf among floats as files store them: little-endian bytes without alignment.

named_enum! {
    /// A stored format of floats, by candle's name of the type.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum FloatFormat {
        /// Double precision: 8 bytes.
        F64 = "f64",
        /// Single precision: 4 bytes.
        F32 = "f32",
        /// Half precision (IEEE): 2 bytes, 5 bits of exponent.
        F16 = "f16",
        /// bfloat16: 2 bytes, 8 bits of exponent.
        Bf16 = "bf16",
        /// FP8 (e4m3): 1 byte, 4 bits of exponent; it has no Inf.
        F8E4M3 = "f8e4m3",
    }
}

/// The first value of a tensor that is NaN or Inf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotFinite {
    /// Row-major index of the value.
    pub index: usize,
    /// `NaN`, `Inf` or `-Inf`.
    pub value: &'static str,
}

/// Number of values that are scanned without a branch in between.
const BLOCK: usize = 4096;

impl FloatFormat {
    /// Size of a value in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4M3 => 1,
        }
    }

    /// The first NaN or Inf among the values in `bytes`; `None` if all are finite.
    pub fn first_not_finite(self, bytes: &[u8]) -> Option<NotFinite> {
        // Mask of the exponent, and mask of the mantissa: NaN has all bits of the first and any of the second.
        match self {
            Self::F64 => find(bytes, u64::from_le_bytes, 0x7ff0_0000_0000_0000, 0x000f_ffff_ffff_ffff),
            Self::F32 => find(bytes, |b| u64::from(u32::from_le_bytes(b)), 0x7f80_0000, 0x007f_ffff),
            Self::F16 => find(bytes, |b| u64::from(u16::from_le_bytes(b)), 0x7c00, 0x03ff),
            Self::Bf16 => find(bytes, |b| u64::from(u16::from_le_bytes(b)), 0x7f80, 0x007f),
            // 448, the largest number, has all exponent bits set; only NaN also has all mantissa bits set.
            Self::F8E4M3 => find(bytes, |[b]| u64::from(b), 0x7f, 0x07),
        }
    }
}

fn find<const SIZE: usize>(
    bytes: &[u8],
    bits: impl Fn([u8; SIZE]) -> u64,
    exponent: u64,
    fraction: u64,
) -> Option<NotFinite> {
    let is_not_finite = |value: &[u8; SIZE]| bits(*value) & exponent == exponent;
    let (values, _) = bytes.as_chunks::<SIZE>();
    let block = values.chunks(BLOCK).position(|block| block.iter().fold(false, |any, x| any | is_not_finite(x)))?;
    let index = block * BLOCK + values[block * BLOCK..].iter().position(is_not_finite)?;
    let found = bits(values[index]);
    let is_negative = found & !(exponent | fraction) != 0;
    let value = match (found & fraction != 0, is_negative) {
        (true, _) => "NaN",
        (false, false) => "Inf",
        (false, true) => "-Inf",
    };
    Some(NotFinite { index, value })
}

/// Converts the row-major `index` of a value to its index on each axis of `shape`.
pub fn coordinates(index: usize, shape: &[usize]) -> Vec<usize> {
    let mut rest = index;
    let mut found: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&size| {
            let position = rest % size.max(1);
            rest /= size.max(1);
            position
        })
        .collect();
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_nan_or_inf_of_each_format_is_found() {
        use FloatFormat::{Bf16, F8E4M3, F16, F32, F64};
        let f32_bytes = |value: f32| value.to_le_bytes().to_vec();
        let cases: [(FloatFormat, Vec<u8>, Vec<u8>, &str); 9] = [
            (F32, f32_bytes(f32::MAX), f32_bytes(f32::NAN), "NaN"),
            (F32, f32_bytes(-1.5), f32_bytes(f32::NEG_INFINITY), "-Inf"),
            (F64, f64::MIN.to_le_bytes().to_vec(), f64::INFINITY.to_le_bytes().to_vec(), "Inf"),
            (F64, f64::MIN_POSITIVE.to_le_bytes().to_vec(), (-f64::NAN).to_le_bytes().to_vec(), "NaN"),
            (Bf16, 0xff7f_u16.to_le_bytes().to_vec(), 0x7f81_u16.to_le_bytes().to_vec(), "NaN"),
            (Bf16, 0x7f7f_u16.to_le_bytes().to_vec(), 0xff80_u16.to_le_bytes().to_vec(), "-Inf"),
            (F16, 0x7bff_u16.to_le_bytes().to_vec(), 0x7c00_u16.to_le_bytes().to_vec(), "Inf"),
            (F16, 0xfbff_u16.to_le_bytes().to_vec(), 0x7e00_u16.to_le_bytes().to_vec(), "NaN"),
            (F8E4M3, vec![0x7e], vec![0xff], "NaN"),
        ];
        for (format, finite, other, value) in cases {
            assert_eq!(finite.len(), format.size());
            assert_eq!(format.first_not_finite(&finite.repeat(3 * BLOCK)), None, "{format:?}");
            for index in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 7] {
                // Also from an odd address.
                let bytes = [vec![0], finite.repeat(index), other.clone(), finite.repeat(9), other.clone()].concat();
                assert_eq!(format.first_not_finite(&bytes[1..]), Some(NotFinite { index, value }), "{format:?}");
            }
        }
        assert_eq!(F32.first_not_finite(&[]), None);
        assert_eq!(["f32", "bf16", "u8"].map(FloatFormat::from_name), [Some(F32), Some(Bf16), None]);
    }

    #[test]
    fn an_index_is_given_on_each_axis() {
        assert_eq!(coordinates(17, &[4, 5]), [3, 2]);
        assert_eq!(coordinates(59, &[3, 4, 5]), [2, 3, 4]);
        assert_eq!(coordinates(6, &[7]), [6]);
        assert!(coordinates(0, &[]).is_empty());
    }
}
