//! Types that all crates of querl share: pipeline records, traits of external components (teacher, judge, retriever,
//! environment, plugins), the resolved configuration, the layout of a run directory, atomic file writes, the reader of models'
//! configurations, a scan of stored floats for NaN and Inf, the memory of the process, a rate limit of log lines, and sanitised
//! text for terminals.
//!
//! This crate must not depend on tensors, WebAssembly, HTTP or an async runtime.

/// Declares an enum whose variants have names, in files or messages: `Name = "name"`.
#[macro_export]
macro_rules! named_enum {
    ($(#[$meta:meta])* pub enum $Enum:ident { $($(#[$doc:meta])* $Variant:ident = $name:literal,)* }) => {
        $(#[$meta])*
        pub enum $Enum {
            $($(#[$doc])* $Variant,)*
        }

        impl $Enum {
            /// All variants, in order.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$Variant),*];

            /// The name of the variant.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$Variant => $name,)*
                }
            }

            /// The variant of this name; `None` if there is none.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|one| one.name() == name)
            }
        }
    };
}

pub mod config;
pub mod dir_lock;
pub mod edits;
pub mod episodes;
pub mod floats;
pub mod fsx;
pub mod log_limit;
pub mod memory;
pub mod model_config;
pub mod ports;
pub mod records;
pub mod responses;
pub mod run_dir;
pub mod scoring;
pub mod serving;
pub mod text;

/// Configuration of property tests: the same cases in each run.
#[cfg(test)]
pub(crate) fn properties(cases: u32) -> proptest::test_runner::Config {
    let rng_seed = proptest::test_runner::RngSeed::Fixed(7);
    proptest::test_runner::Config { cases, rng_seed, failure_persistence: None, ..Default::default() }
}
