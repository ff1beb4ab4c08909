//! The parser of recorded episodes: a line is rejected with a message, or becomes an episode with finite numbers.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|line: &[u8]| {
    match querl_core::episodes::parse(line, 1) {
        Ok(None) | Ok(Some(_)) => {}
        Err(reason) => assert!(!reason.is_empty()),
    }
});
