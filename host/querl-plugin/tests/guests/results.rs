//! Guests whose results violate the contract.

use crate::common::{assert_others_are_served, episode, fault_message, guest, host, load_guest, refusal, title};
use querl_core::config::PluginLimits;
use querl_core::ports::FaultKind;
use querl_plugin::{PluginPort, PluginSettings};

/// The message about the second of three episodes; its result violates the contract.
fn message_of_result(name: &str, query: &str) -> String {
    let (message, kind) = fault_message(name, query, PluginLimits::default());
    assert_eq!(kind, FaultKind::Result, "{message}");
    let sentence = message.strip_prefix(&format!("plugin {}: episode `step-1/b/0`: ", title(name)));
    sentence.unwrap_or_else(|| panic!("names plugin, version and episode: {message}")).to_owned()
}

#[test]
fn wrong_batch_length_is_a_fault() {
    let host = host();
    let batch: Vec<_> = ["a", "b", "c"].iter().map(|id| episode(id, "好")).collect();
    let message = guest(&host, "wrong-length").score_batch(&batch).unwrap_err().to_string();
    let range = "(a batch from episode `a` to `c`)";
    assert_eq!(message, format!("plugin guest-wrong-length 0.2.0: returned 2 scores for 3 episodes {range}"));
    let message = guest(&host, "too-many-scores").score_batch(&batch).unwrap_err().to_string();
    assert_eq!(message, format!("plugin too-many-scores 0.1.0: returned 1000 scores for 3 episodes {range}"));
    assert_others_are_served(&host);
}

#[test]
fn list_that_is_longer_than_memory_is_a_fault() {
    let host = host();
    let fault = guest(&host, "endless-list").score_batch(&[episode("a", "好")]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Result);
    let expected = "plugin endless-list 0.1.0: episode `a`: returned what cannot be read: list pointer/length out of bounds of memory";
    assert_eq!(fault.to_string(), expected);
    assert_others_are_served(&host);
}

#[test]
fn nan_is_a_fault() {
    let message = message_of_result("nan", "nan");
    assert_eq!(message, "total is NaN; expected a number within the declared range 0 to 1");
}

#[test]
fn results_against_the_contract_are_faults() {
    for (name, expected) in [
        ("infinite-total", "total is inf; expected a number within the declared range 0 to 1"),
        ("infinite-component", "component `part` is -inf; expected a finite number"),
        ("repeated-component", "component `part` appears twice"),
        // The message shows the code without control characters.
        ("bad-code", "rejected with the code `[2JNo`; expected 1 to 64 of a to z, 0 to 9 and _"),
        ("bad-pointer", "returned what cannot be read: string pointer/length out of bounds of memory"),
    ] {
        assert_eq!(message_of_result(name, "x"), expected, "{name}");
    }
}

#[test]
fn unreadable_values_are_faults_in_results_logs_and_keys() {
    for (name, expected) in [
        ("invalid-utf8-result", "invalid utf-8 sequence"),
        ("invalid-utf8-log", "invalid utf-8 sequence"),
        ("invalid-utf8-key", "invalid utf-8 sequence"),
        ("bad-tag", ""),
    ] {
        let message = message_of_result(name, "x");
        assert!(message.starts_with(&format!("returned what cannot be read: {expected}")), "{name}: {message}");
    }
}

#[test]
fn total_out_of_the_declared_range_is_a_fault() {
    let message = message_of_result("out-of-range", "far");
    assert_eq!(message, "total is 1.5; expected a number within the declared range 0 to 1");
}

#[test]
fn range_without_ends_is_refused_before_the_first_score() {
    let host = host();
    let plugin = load_guest(&host, "infinite-range").unwrap();
    let message = host.open(&plugin, &PluginSettings::default(), PluginPort::reward()).err().unwrap().to_string();
    let expected = "plugin infinite-range 0.1.0: declares the range -inf to inf; expected two finite numbers, the first below the second";
    assert_eq!(message, expected);
    assert_others_are_served(&host);
}

#[test]
fn name_that_clears_the_screen_is_refused_and_shown_without_escapes() {
    let message = refusal("escapes-in-name");
    assert!(message.contains("it calls itself `a[2Jbc`, version `0.1.0`; expected lower-case letters"), "{message}");
    assert!(!message.contains('\u{1b}') && !message.contains('\u{202e}'));
}

#[test]
fn keys_with_escapes_are_not_shown_to_the_user() {
    let host = host();
    let plugin = load_guest(&host, "escapes-in-keys").unwrap();
    let message =
        host.open(&plugin, &toml::from_str("colour = 1").unwrap(), PluginPort::reward()).err().unwrap().to_string();
    let expected = "plugin escapes-in-keys 0.1.0: setting `colour`: the plugin knows no such setting; it knows `depth`";
    assert_eq!(message, expected);
    host.open(&plugin, &toml::from_str("depth = 1").unwrap(), PluginPort::reward()).unwrap();
}

#[test]
fn packed_results_are_believed_no_more_than_others() {
    let host = host();
    let fault_message = |name: &str| {
        let plugin = guest(&host, name);
        let fault = plugin.score_batch(&[episode("a", "x"), episode("b", "好")]).unwrap_err();
        assert_eq!(plugin.score_batch(&[episode("a", "好")]).unwrap()[0].as_ref().unwrap().total, 0.5);
        (fault.to_string(), fault.kind)
    };
    let (message, kind) = fault_message("packed-garbage");
    assert!(message.starts_with("plugin packed-garbage 0.1.0: episode `a`: byte 5 of its packed results"), "{message}");
    assert_eq!(kind, FaultKind::Result);
    let (message, kind) = fault_message("packed-too-many");
    assert!(message.ends_with("its packed results are 4294967295; expected 1, one for each episode"), "{message}");
    assert_eq!(kind, FaultKind::Result);
    let (message, kind) = fault_message("packed-flood");
    assert!(message.ends_with("returned more than 16777216 bytes (`plugins.limits.output_bytes`)"), "{message}");
    assert_eq!(kind, FaultKind::Limit);
    assert_others_are_served(&host);
}

#[test]
fn trap_is_a_fault_and_the_next_call_works() {
    let (message, kind) = fault_message("divides-by-zero", "x", PluginLimits::default());
    assert!(message.ends_with("episode `step-1/b/0`: trapped: wasm trap: integer divide by zero"), "{message}");
    assert_eq!(kind, FaultKind::Trap);
}
