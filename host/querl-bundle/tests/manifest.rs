//! Valid manifests, and the errors for invalid ones.
#![allow(clippy::unwrap_used)]

mod common;

use common::MANIFEST;
use querl_bundle::{HostInterface, Kind, Manifest};
use querl_core::config::PluginLimits;
use std::collections::BTreeMap;

fn parsed() -> Manifest {
    Manifest::parse(MANIFEST, "plugin.toml").unwrap()
}

fn settings(text: &str) -> BTreeMap<String, toml::Value> {
    toml::from_str(text).unwrap()
}

#[test]
fn manifest_is_read() {
    let manifest = parsed();
    assert_eq!(manifest.plugin.kinds, [Kind::Reward]);
    assert_eq!(manifest.plugin.range, Some((0.0, 1.0)));
    assert_eq!(manifest.plugin.golden, "golden");
    assert_eq!(manifest.file_name(), "reward-brevity-0.1.0.querl");
    assert_eq!(manifest.limits.fuel_per_item, Some(2_000_000));
    assert_eq!(manifest.defaults(), settings("max_chars = 40\nmode = 'soft'"));
}

#[test]
fn manifest_written_and_read_again_is_the_same() {
    let odd = "[settings.\"a-b\"]\ntype = \"text\"\ndefault = \"一行\\n两行 \\\"引号\\\" '\"\ndoc = '''多\n行'''\n\
               [settings.low]\ntype = \"number\"\nminimum = -1e-7\n[build]\nlanguage = \"python\"\n";
    for text in [MANIFEST.to_owned(), format!("{MANIFEST}{odd}")] {
        let manifest = Manifest::parse(&text, "plugin.toml").unwrap();
        let again = manifest.to_text();
        assert_eq!(Manifest::parse(&again, "again").unwrap(), manifest, "{again}");
        assert_eq!(Manifest::parse(&again, "again").unwrap().to_text(), again);
    }
}

/// A part of the manifest, its replacement, and the error message without `plugin.toml:`.
const MISTAKES: &str = r#"
id = "reward-brevity" => id = "Reward" => 2: plugin.id is "Reward"; expected 1 to 64 of a to z, 0 to 9 and -
id = "reward-brevity" =>  => 1: the key plugin.id is missing; expected 1 to 64 of a to z, 0 to 9 and -
id = "reward-brevity" => id = 3 => 2: plugin.id is 3; expected a text
id = "reward-brevity" => id = "a\u0007" => 2: plugin.id is "a\u{7}"; expected 1 to 64 of a to z, 0 to 9 and -, on one line
version = "0.1.0" => version = "1.0" => 3: plugin.version is "1.0"; expected a semantic version, such as 0.1.0
kinds = ["reward"] => kinds = ["rewards"] => 5: plugin.kinds is ["rewards"]; expected a list of prompt, filter, reward, group-reward or style-scorer; did you mean `reward`?
kinds = ["reward"] => kinds = [] => 5: plugin.kinds is []; expected a list of prompt, filter, reward, group-reward or style-scorer
kinds = ["reward"] => kinds = ["reward", "reward"] => 5: plugin.kinds has `reward` twice; expected each kind once
kinds = ["reward"] => kinds = ["filter"] => 8: plugin.range is for rewards alone; leave it out, or add `reward` to kinds
range = [0.0, 1.0] =>  => 1: the key plugin.range is missing; expected two finite numbers, the lower one first, such as [0.0, 1.0]
range = [0.0, 1.0] => range = [1, 1] => 8: plugin.range is [1, 1]; expected two finite numbers, the lower one first, such as [0.0, 1.0]
range = [0.0, 1.0] => range = [0.0, inf] => 8: plugin.range is [0.0, inf]; expected two finite numbers, the lower one first, such as [0.0, 1.0]
range = [0.0, 1.0] => range = [0.0, 1.0]\ngolden = "../x" => 9: plugin.golden is "../x"; expected a folder below the plugin's own, such as golden
license = => licence = => 7: unknown key plugin.licence; did you mean `license`?
[limits] => [limit] => 32: unknown key limit; did you mean `limits`?
default = 40 => default = 4000 => 12: settings.max_chars.default is 4000; expected a whole number from 1 to 1000
default = 40 => default = 4.5 => 12: settings.max_chars.default is 4.5; expected a whole number from 1 to 1000
minimum = 1\n => minimum = 1.5\n => 13: settings.max_chars.minimum is 1.5; expected a whole number from -2^53 to 2^53
maximum = 1000 => maximum = 0 => 14: settings.max_chars.maximum is 0; expected 1 (the minimum) or more
default = "soft" => default = "Soft" => 19: settings.mode.default is "Soft"; expected soft or hard
choices = ["soft", "hard"] => choices = ["soft", "soft"] => 20: settings.mode.choices is ["soft", "soft"]; expected one text or more, each once
type = "list" => type = "lists" => 27: settings.banned.type is "lists"; expected number, integer, boolean, text or list
type = "list" => type = "texts" => 27: settings.banned.type is "texts"; expected number, integer, boolean, text or list; did you mean `list`?
type = "list" => type = "list"\nchoices = ["a"] => 28: settings.banned.choices is for texts; this setting is a list
type = "boolean" => type = "boolean"\nminimum = 0 => 31: settings.strict.minimum is for numbers and integers; this setting is a boolean
[settings.strict] => [settings."严 格"] => 10: settings has the key "严 格"; expected 1 to 64 letters, digits, _ and -
memory_bytes = 67108864 => memory_bytes = 100 => 34: limits.memory_bytes is 100; expected a whole number of 65536 or more
[limits] => [build]\nlanguage = "go"\n[limits] => 33: build.language is "go"; expected rust, python or javascript
[limits] => [bundle]\nformat = 2\n[limits] => 33: bundle.format is 2; this querl reads format 1; use a newer querl
[plugin] => [plugin => 1: not valid TOML:
[plugin] => [plugin]\nid = "x" => 3: not valid TOML: duplicate key
"#;

#[test]
fn mistakes_are_reported_with_line_key_value_and_expectation() {
    for (text, expected) in common::replaced(MANIFEST, MISTAKES) {
        let error = Manifest::parse(&text, "plugin.toml").unwrap_err().to_string();
        let error = error.strip_prefix("plugin.toml:").unwrap();
        match expected.contains("not valid TOML") {
            true => assert!(error.starts_with(expected), "{error}"),
            false => assert_eq!(error, expected),
        }
    }
}

#[test]
fn other_contracts_are_refused_in_one_sentence() {
    let error = |contract: &str| {
        let text = MANIFEST.replace("contract = \"0.1.0\"", &format!("contract = \"{contract}\""));
        Manifest::parse(&text, "plugin.toml").map_err(|error| error.to_string())
    };
    assert_eq!(
        error("0.3.0").unwrap_err(),
        "plugin.toml:4: plugin.contract is 0.3.0, which is newer than the contract of this querl (0.1.x, 0.2.x); use a newer \
         querl, or build the plugin for 0.2.0"
    );
    assert!(error("0.0.9").unwrap_err().contains("which this querl does not speak"));
    assert!(error("0.1.0-rc.1").unwrap_err().contains("does not speak"));
    assert!(error("0.1.7").is_ok() && error("0.2.3").is_ok());
}

#[test]
fn group_rewards_and_host_functions_are_of_contract_0_2() {
    let parse = |contract: &str, kinds: &str, more: &str| {
        let text = MANIFEST.replace("contract = \"0.1.0\"", &format!("contract = \"{contract}\"\n{more}"));
        let text = text.replace("kinds = [\"reward\"]", &format!("kinds = {kinds}"));
        Manifest::parse(&text, "x").map_err(|error| error.to_string())
    };
    let functions = "host_functions = [\"judge\", \"tokens\"]";
    let manifest = parse("0.2.0", "[\"group-reward\"]", functions).unwrap();
    assert_eq!(manifest.plugin.kinds, [Kind::GroupReward]);
    assert_eq!(manifest.plugin.host_functions, [HostInterface::Tokens, HostInterface::Judge]);
    assert_eq!(Manifest::parse(&manifest.to_text(), "again").unwrap(), manifest);
    for (contract, kinds, more, expected) in [
        ("0.1.0", "[\"group-reward\"]", "", "contract is 0.1.0, which has no `group-reward`"),
        ("0.1.0", "[\"reward\"]", functions, "host_functions is for contract 0.2.0"),
        ("0.2.0", "[\"reward\", \"group-reward\"]", "", "kinds has `reward` and `group-reward`; expected one of them"),
        (
            "0.2.0",
            "[\"reward\"]",
            "host_functions = [\"eyes\"]",
            "expected a list of tokens, words, similarity, judge or",
        ),
        ("0.2.0", "[\"reward\"]", "host_functions = [\"judge\", \"judge\"]", "has `judge` twice"),
    ] {
        let error = parse(contract, kinds, more).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn settings_of_the_user_are_checked() {
    let manifest = parsed();
    let fine = "max_chars = 1000\nmode = 'hard'\nweight = 3\nbanned = ['治愈']\nstrict = false";
    manifest.check_settings(&settings(fine)).unwrap();
    manifest.check_settings(&BTreeMap::new()).unwrap();
    for (text, expected) in [
        ("max_char = 1", "setting `max_char`: the plugin knows no such setting; did you mean `max_chars`?"),
        (
            "zzz = 1",
            "setting `zzz`: the plugin knows no such setting; expected banned, max_chars, mode, strict or weight",
        ),
        ("max_chars = 1001", "setting `max_chars`: expected a whole number from 1 to 1000, got 1001"),
        ("max_chars = 1.0", "setting `max_chars`: expected a whole number from 1 to 1000, got 1.0"),
        ("mode = 'medium'", "setting `mode`: expected soft or hard, got \"medium\""),
        // Symptom: the error advised to quote the value, and the quoted text was rejected too.
        ("mode = nan", "setting `mode`: expected soft or hard, got nan"),
        ("weight = nan", "setting `weight`: expected a number of 0 or more, got nan"),
        ("weight = '1'", "setting `weight`: expected a number of 0 or more, got \"1\""),
        ("banned = ['a', 1]", "setting `banned`: expected a list of texts, got [\"a\", 1]"),
        ("strict = 'yes'", "setting `strict`: expected true or false, got \"yes\""),
        ("strict = { a = 1 }", "setting `strict`: expected true or false, got a section"),
    ] {
        assert_eq!(manifest.check_settings(&settings(text)).unwrap_err().to_string(), expected);
    }
    let noted = Manifest::parse(&format!("{MANIFEST}\n[settings.note]\ntype = \"text\"\n"), "plugin.toml").unwrap();
    let problem = noted.check_settings(&settings("note = 78")).unwrap_err().to_string();
    assert_eq!(problem, "setting `note`: expected a text, got 78; quote it, on a command line as 'note=\"78\"'");
    let bare = Manifest::parse(MANIFEST.split("[settings").next().unwrap(), "plugin.toml").unwrap();
    let problem = bare.check_settings(&settings("a = 1")).unwrap_err();
    assert_eq!(problem.to_string(), "setting `a`: the plugin has no settings");
}

#[test]
fn a_plugin_that_asks_for_less_gets_less_and_for_more_is_refused() {
    let host = PluginLimits::default();
    let effective = parsed().effective_limits(&host).unwrap();
    assert_eq!((effective.fuel_per_item, effective.memory_bytes), (2_000_000, 64 << 20));
    assert_eq!(effective.timeout_ms, host.timeout_ms);
    let tight = PluginLimits { fuel_per_item: 1000, ..host };
    let expected = "asks for a fuel_per_item of 2000000, and this host allows 1000; raise `plugins.limits.fuel_per_item` to 2000000 or more";
    assert_eq!(parsed().effective_limits(&tight).unwrap_err(), expected);
}

#[test]
fn fuel_of_a_call_is_requested_apart_from_that_of_an_item() {
    let text = MANIFEST.replace("fuel_per_item =", "fuel_per_call = 500\nfuel_per_item =");
    let manifest = Manifest::parse(&text, "plugin.toml").unwrap();
    let host = PluginLimits::default();
    let effective = manifest.effective_limits(&host).unwrap();
    assert_eq!((effective.fuel_per_call, effective.fuel_per_item), (500, 2_000_000));
    assert_eq!(parsed().effective_limits(&host).unwrap().fuel_per_call, host.fuel_per_call);
    assert_eq!(Manifest::parse(&manifest.to_text(), "again").unwrap(), manifest);
}

/// Text whose recursive parsing would need a stack frame per nesting level.
#[test]
fn deeply_nested_text_is_refused() {
    const LEVELS: usize = 100_000;
    for text in [
        format!("x = {}", "[".repeat(LEVELS)),
        format!("x = {}", "{a=".repeat(LEVELS)),
        format!("{}x = 1", "a.".repeat(LEVELS)),
        format!("[{}x]", "a.".repeat(LEVELS)),
        format!("{MANIFEST}\n[settings{}]\ntype = 'text'", ".a".repeat(LEVELS)),
        format!("x = {{ {}x = 1 }}", "a.".repeat(LEVELS)),
    ] {
        let error = Manifest::parse(&text, "plugin.toml").unwrap_err().to_string();
        assert!(error.starts_with("plugin.toml:") && error.len() < 500, "{}", &error[..500]);
    }
}

/// A description that a terminal displays in another order than its characters, and names with look-alike characters.
#[test]
fn texts_that_hide_or_reorder_are_refused() {
    for (old, new, key, code) in [
        ("description = \"短的改写得分高\"", "description = \"\u{202e}The policy\"", "plugin.description", "U+202E"),
        ("description = \"短的改写得分高\"", "description = \"The \\u200bpolicy\"", "plugin.description", "U+200B"),
        ("license = \"Apache-2.0\"", "license = \"Apache\u{ad}-2.0\"", "plugin.license", "U+00AD"),
        ("doc = \"改写最多的字数\"", "doc = \"一行\\n\u{2066}二行\"", "settings.max_chars.doc", "U+2066"),
        ("[\"soft\", \"hard\"]", "[\"soft\", \"soft\u{200d}\"]", "settings.mode.choices", "U+200D"),
        ("range = [0.0, 1.0]", "range = [0.0, 1.0]\ngolden = \"gol\u{feff}den\"", "plugin.golden", "u{feff}"),
    ] {
        assert!(MANIFEST.contains(old), "{old}");
        let error = Manifest::parse(&MANIFEST.replace(old, new), "plugin.toml").unwrap_err().to_string();
        assert!(error.contains(key) && error.contains(code), "{error}");
        assert!(!error.contains(['\u{202e}', '\u{200b}', '\u{ad}', '\u{2066}', '\u{200d}', '\u{feff}']), "{error:?}");
    }
    // An error message of the TOML library must not contain such a character either.
    let twice = "[plugin]\n\"\u{202e}a\" = 1\n\"\u{202e}a\" = 2\n";
    let error = Manifest::parse(twice, "plugin.toml").unwrap_err().to_string();
    assert!(error.contains("not valid TOML") && !error.contains('\u{202e}'), "{error:?}");
}
