//! Loops compiled several times, for the vector instructions that the processor has.

/// Products with an addition, as the instruction set does them.
pub(super) trait Arithmetic {
    /// `a * b + c`.
    fn multiply_add(a: f32, b: f32, c: f32) -> f32;
}

pub(super) struct Fused;

/// Two instructions: a fused product without hardware for it is a slow call.
pub(super) struct Plain;

impl Arithmetic for Fused {
    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Arithmetic for Plain {
    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// Defines a function whose body is compiled for AVX-512, for AVX2 and for any processor, and which calls the best of them.
/// The body is written with lanes (arrays of 16), so that the compiler can turn each step into vector instructions, and
/// with `A::multiply_add`.
macro_rules! vectorised {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident<$A:ident>($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$attribute])*
        $visibility fn $name($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body<$A: $crate::generate::vectorised::Arithmetic>($($argument: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::generate::vectorised::{Fused, Plain};
                use $crate::kernels::Level;
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
                fn avx512($($argument: $type),*) $(-> $result)? {
                    body::<Fused>($($argument),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($argument: $type),*) $(-> $result)? {
                    body::<Fused>($($argument),*)
                }
                match Level::detected() {
                    // SAFETY: the level says that the processor has these instructions.
                    Level::Avx512 => unsafe { avx512($($argument),*) },
                    // SAFETY: as above.
                    Level::Avx2 => unsafe { avx2($($argument),*) },
                    Level::Portable => body::<Plain>($($argument),*),
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            body::<$crate::generate::vectorised::Plain>($($argument),*)
        }
    };
}
pub(super) use vectorised;

/// `e^x` to about 2 units in the last place; 0 below -87.
///
/// Source: the Cephes single-precision `expf` (range reduction by ln 2 in two parts, degree 5 polynomial).
#[inline(always)]
pub(super) fn exp_or_zero<A: Arithmetic>(x: f32) -> f32 {
    let clamped = x.clamp(-87.0, 88.0);
    let rounding = 12_582_912.0_f32; // 1.5 * 2^23: adding it rounds to the nearest integer, which stands in the lowest bits
    let rounded = A::multiply_add(clamped, std::f32::consts::LOG2_E, rounding);
    let n = rounded - rounding;
    let r = A::multiply_add(n, 2.121_944_4e-4, A::multiply_add(n, -0.693_359_4, clamped));
    let mut p = 1.987_569_1e-4_f32;
    p = A::multiply_add(p, r, 1.398_199_9e-3);
    p = A::multiply_add(p, r, 8.333_452e-3);
    p = A::multiply_add(p, r, 4.166_579_6e-2);
    p = A::multiply_add(p, r, 1.666_666_5e-1);
    p = A::multiply_add(p, r, 0.5);
    let mantissa = A::multiply_add(p * r, r, r) + 1.0;
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23)); // 2^n
    if x < -87.0 { 0.0 } else { mantissa * power }
}

/// Values that are worked on side by side: one AVX-512 register.
pub(super) const LANES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_agree_with_the_standard_library() {
        for i in -8700..=8000 {
            let x = i as f32 * 0.01;
            let expected = f64::from(x).exp();
            for found in [exp_or_zero::<Fused>(x), exp_or_zero::<Plain>(x)] {
                let relative = (f64::from(found) - expected).abs() / expected;
                assert!(relative < 3e-7, "exp({x}) is off by {relative}");
            }
        }
        assert_eq!((exp_or_zero::<Plain>(-88.0), exp_or_zero::<Plain>(f32::NEG_INFINITY)), (0.0, 0.0));
        assert!(exp_or_zero::<Plain>(f32::NAN).is_nan());
    }
}
