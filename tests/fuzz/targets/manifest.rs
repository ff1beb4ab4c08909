//! The parser of `plugin.toml`: a text is rejected with a position, or becomes a manifest that is unchanged when written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use querl_bundle::Manifest;
use querl_core::config::PluginLimits;

fuzz_target!(|text: &str| {
    let manifest = match Manifest::parse(text, "plugin.toml") {
        Ok(manifest) => manifest,
        Err(error) => return assert!(error.to_string().starts_with("plugin.toml:")),
    };
    let again = manifest.to_text();
    let read_again = Manifest::parse(&again, "again").expect("what was written can be read");
    assert_eq!(read_again, manifest, "{again}");
    assert_eq!(read_again.to_text(), again);
    manifest.check_settings(&manifest.defaults()).expect("defaults fit");
    if let Ok(limits) = manifest.effective_limits(&PluginLimits::default()) {
        assert!(limits.fuel_per_item <= PluginLimits::default().fuel_per_item);
    }
});
