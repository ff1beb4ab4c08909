//! The parser of `querl.lock`: a text is rejected with a position, or becomes a consistent lock file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use querl_bundle::lock::{LockFile, LockKind};

fuzz_target!(|text: &str| {
    let file = match LockFile::parse(text, "querl.lock") {
        Ok(file) => file,
        Err(error) => return assert!(error.to_string().starts_with("querl.lock:")),
    };
    let again = file.to_text(LockKind::Run);
    assert_eq!(LockFile::parse(&again, "again").expect("what was written can be read"), file, "{again}");
    assert_eq!(file.check(&file.entries), []);
    let mut emptied = file.clone();
    assert_eq!(emptied.accept(Vec::new(), "2026-01-01T00:00:00Z").len(), file.entries.len());
});
