//! SIMD dispatch: detects AVX2 and AVX-512 once, and compiles functions for each level (`vectorised!`).

use std::sync::OnceLock;

/// SIMD instruction set. All levels give the same results up to rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SimdLevel {
    /// Only instructions of the build target.
    Portable,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors.
    Avx512,
}

impl SimdLevel {
    /// The highest level of this CPU; in a test within [`SimdLevel::with`] the level set there.
    pub(crate) fn detected() -> Self {
        #[cfg(test)]
        if let Some(level) = CHOSEN.get() {
            return level;
        }
        static LEVEL: OnceLock<SimdLevel> = OnceLock::new();
        *LEVEL.get_or_init(detect)
    }

    /// All levels of this CPU in ascending order, for tests.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        let order = [Self::Portable, Self::Avx2, Self::Avx512];
        let best = order.iter().position(|&level| level == detect()).unwrap_or_default();
        order[..=best].to_vec()
    }

    /// Runs `f` as on a CPU with this level, on separate threads, so that concurrent tests are not affected.
    ///
    /// # Panics
    /// The CPU does not have the level.
    #[cfg(test)]
    pub(crate) fn with<R: Send>(self, f: impl FnOnce() -> R + Send) -> R {
        assert!(Self::all().contains(&self), "this processor does not have {self:?}");
        let pool =
            rayon::ThreadPoolBuilder::new().num_threads(2).start_handler(move |_| CHOSEN.set(Some(self))).build();
        pool.unwrap_or_else(|error| panic!("threads for {self:?}: {error}")).install(f)
    }
}

#[cfg(test)]
thread_local! {
    static CHOSEN: std::cell::Cell<Option<SimdLevel>> = const { std::cell::Cell::new(None) };
}

#[cfg(target_arch = "x86_64")]
fn detect() -> SimdLevel {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq");
    match (avx512, avx2) {
        (true, _) => SimdLevel::Avx512,
        (false, true) => SimdLevel::Avx2,
        (false, false) => SimdLevel::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> SimdLevel {
    SimdLevel::Portable
}

/// Multiply-add, fused or not depending on the instruction set.
pub(crate) trait Arithmetic {
    /// `a * b + c`.
    fn multiply_add(a: f32, b: f32, c: f32) -> f32;
}

/// Multiplication and addition in one instruction.
pub(crate) struct Fused;

/// Multiplication and addition in two instructions: without hardware support, a fused multiply-add is a slow function call.
pub(crate) struct Plain;

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

/// Defines a function whose body is compiled once for each level and called at the level of this CPU. The body is written with
/// arrays of [`LANES`](super::LANES) values, so that the compiler can turn each step into vector instructions.
///
/// The body of `fn name(..)` keeps to plain arithmetic: the compiler must not fuse a multiplication with an addition on its own, so
/// all levels give the same bits. The body of `fn name<A>(..)` uses `A::multiply_add`, which is fused where the CPU can.
macro_rules! vectorised {
    (@define [$($head:tt)*] $name:ident [$($generics:tt)*] ($($arg:ident: $type:ty),*) [$($ret:tt)*] $body:block
        $fused:expr, $plain:expr) => {
        $($head)* fn $name($($arg: $type),*) $($ret)* {
            #[inline(always)]
            fn body $($generics)* ($($arg: $type),*) $($ret)* $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
                fn avx512($($arg: $type),*) $($ret)* {
                    $fused($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $type),*) $($ret)* {
                    $fused($($arg),*)
                }
                match $crate::kernels::simd::SimdLevel::detected() {
                    // SAFETY: the CPU has the instructions of the detected level.
                    $crate::kernels::simd::SimdLevel::Avx512 => unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::kernels::simd::SimdLevel::Avx2 => unsafe { avx2($($arg),*) },
                    $crate::kernels::simd::SimdLevel::Portable => $plain($($arg),*),
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            $plain($($arg),*)
        }
    };
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$A:ident>($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $crate::kernels::simd::vectorised! {
            @define [$(#[$meta])* $vis] $name [<$A: $crate::kernels::simd::Arithmetic>] ($($arg: $type),*) [$(-> $ret)?] $body
            body::<$crate::kernels::simd::Fused>, body::<$crate::kernels::simd::Plain>
        }
    };
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $crate::kernels::simd::vectorised! {
            @define [$(#[$meta])* $vis] $name [] ($($arg: $type),*) [$(-> $ret)?] $body body, body
        }
    };
}

pub(crate) use vectorised;

/// `e^x` to about 2 units in the last place; 0 below -87.
///
/// Source: the Cephes single-precision `expf` (range reduction by ln 2 in two parts, degree 5 polynomial).
#[inline(always)]
pub(crate) fn exp_or_zero<A: Arithmetic>(x: f32) -> f32 {
    let clamped = x.clamp(-87.0, 88.0);
    let rounding = 12_582_912.0_f32; // 1.5 * 2^23: adding it rounds to the nearest integer, held in the lowest bits
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
