//! SIMD dispatch: detects AVX2 and AVX-512 once, and compiles functions for each level (`vectorised!`).

use std::sync::OnceLock;

/// SIMD instruction set. All levels give the same results up to rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// The build target's instructions.
    Portable,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors.
    Avx512,
}

impl Level {
    /// The best level of this processor; in a test within [`Level::with`] the one that it names.
    pub(crate) fn detected() -> Self {
        #[cfg(test)]
        if let Some(level) = CHOSEN.get() {
            return level;
        }
        static LEVEL: OnceLock<Level> = OnceLock::new();
        *LEVEL.get_or_init(detect)
    }

    /// All levels that this processor has, the best last: tests run each.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        let order = [Self::Portable, Self::Avx2, Self::Avx512];
        let best = order.iter().position(|&level| level == detect()).unwrap_or_default();
        order[..=best].to_vec()
    }

    /// Runs `f` as on a processor that has no more than this level: on threads of its own, so that tests beside it see theirs.
    ///
    /// # Panics
    /// The processor does not have the level.
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
    static CHOSEN: std::cell::Cell<Option<Level>> = const { std::cell::Cell::new(None) };
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq");
    match (avx512, avx2) {
        (true, _) => Level::Avx512,
        (false, true) => Level::Avx2,
        (false, false) => Level::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Portable
}

/// Defines a function whose body is compiled once for each level and called at the level of this processor.
///
/// The body keeps to plain arithmetic that the compiler can vectorise: it is not allowed to fuse a multiplication with an
/// addition on its own, so all levels give the same bits.
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $type),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $type),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
                fn avx512($($arg: $type),*) $(-> $ret)? {
                    body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $type),*) $(-> $ret)? {
                    body($($arg),*)
                }
                use $crate::kernels::simd::Level;
                match Level::detected() {
                    // SAFETY: the level says that the processor has these instructions.
                    Level::Avx512 => unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Level::Avx2 => unsafe { avx2($($arg),*) },
                    Level::Portable => body($($arg),*),
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            body($($arg),*)
        }
    };
}

pub(crate) use vectorised;
