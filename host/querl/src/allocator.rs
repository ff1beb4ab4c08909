//! What the allocator is told.

use std::ffi::c_int;

/// `mi_option_purge_delay` of mimalloc's header: milliseconds until freed memory goes back to the system, -1 for never.
const PURGE_DELAY: c_int = 15;

/// Keeps freed memory for the next step: a training step of a large model frees a gigabyte and wants it again at once, and pages
/// that the system has taken back are cleared when they return, a fifth of the processor's time. `MIMALLOC_PURGE_DELAY` in the
/// environment stands.
pub fn keep_memory() {
    if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
        // SAFETY: it sets a number that the allocator reads; any number is allowed.
        unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
    }
}

#[cfg(test)]
mod tests {
    use super::PURGE_DELAY;

    #[test]
    fn the_option_is_the_one_that_it_is_taken_for() {
        // SAFETY: it reads a number.
        let default = unsafe { libmimalloc_sys::mi_option_get(PURGE_DELAY) };
        let expected = std::env::var("MIMALLOC_PURGE_DELAY").map_or(1000, |text| text.parse().unwrap_or(1000));
        assert_eq!(default, expected, "mimalloc's options are numbered anew");
    }
}
