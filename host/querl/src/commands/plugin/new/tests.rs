use super::*;
use querl_bundle::Manifest;

fn files(name: &str, kind: Kind, language: Language) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    files::of(name, kind, language).into_iter().map(|file| (file.name, text(&file.bytes))).collect()
}

fn each_template() -> impl Iterator<Item = (Kind, Language)> {
    Kind::ALL.into_iter().flat_map(|kind| Language::ALL.map(|language| (kind, language)))
}

#[test]
fn every_template_is_a_whole_plugin_of_its_kind() {
    for (kind, language) in each_template() {
        let files = files("my-plugin", kind, language);
        let text = |name: &str| files.iter().find(|(file, _)| file == name).map(|(_, text)| text.as_str());
        let of = |name: &str| text(name).unwrap_or_else(|| panic!("{kind} in {}: no {name}", language.name()));
        let manifest = Manifest::parse(of("plugin.toml"), "plugin.toml").unwrap();
        assert_eq!((manifest.plugin.id.as_str(), &manifest.plugin.kinds[..]), ("my-plugin", &[kind][..]));
        assert!(of("LICENSE").contains("Apache License") && of("README.md").contains("my-plugin"));
        assert!(files.iter().any(|(name, text)| name.starts_with("golden/") && text.contains("\"expect\"")));
        let own: Vec<_> = files.iter().filter(|(name, _)| !name.starts_with("vendor/")).collect();
        assert!(own.iter().any(|(name, text)| name.contains("test") || text.contains("#[test]")), "{kind}: no tests");
        assert!(files.iter().any(|(name, _)| name.starts_with("vendor/") && name.ends_with("wit/worlds.wit")));
    }
}

#[test]
fn no_placeholder_and_no_path_out_of_the_folder_is_left() {
    for (kind, language) in each_template() {
        for (name, text) in files("my-plugin", kind, language) {
            let place = format!("{kind} in {}: {name}", language.name());
            assert!(!name.contains("{{") && !text.contains("{{name}}") && !text.contains("{{version}}"), "{place}");
            assert!(!name.starts_with("vendor/querl-sdk/templates") && !name.contains("__pycache__"), "{place}");
        }
    }
}

#[test]
fn a_reward_takes_fifteen_lines_of_code_at_most() {
    for (language, file, comment) in [
        (Language::Rust, "src/lib.rs", "//"),
        (Language::Python, "plugin.py", "\"\"\""),
        (Language::JavaScript, "plugin.js", "/"),
    ] {
        let files = files("short", Kind::Reward, language);
        let (_, text) = files.iter().find(|(name, _)| name == file).unwrap();
        let author = text.split("#[cfg(test)]").next().unwrap_or_default();
        let counts = |line: &&str| {
            let is_punctuation = line.chars().all(|c| "{}();,".contains(c));
            !line.is_empty() && !line.starts_with(comment) && !is_punctuation
        };
        let lines: Vec<_> = author.lines().map(str::trim).filter(counts).collect();
        assert!(lines.len() <= 15, "{file} has {} lines: {lines:#?}", lines.len());
    }
}

#[test]
fn names_that_no_plugin_can_have_are_refused_with_the_reason() {
    for (name, reason) in [
        ("Brevity", "expected a letter, then letters"),
        ("9lives", "expected a letter"),
        ("a--b", "expected a letter"),
        ("my_reward", "expected a letter"),
        ("end-", "expected a letter"),
        ("../up", "expected a letter"),
        ("", "expected a letter"),
        ("querl-sdk", "the SDK has it"),
        ("async", "Rust has another meaning"),
    ] {
        let error = check_name(name, Language::Rust).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
    assert_eq!(check_name("async", Language::Python), Ok(()));
    assert_eq!(check_name("reward-2", Language::Rust), Ok(()));
}

#[test]
fn folder_with_something_in_it_is_left_alone() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("x");
    assert_eq!(check_free(&folder), Ok(()));
    std::fs::create_dir(&folder).unwrap();
    assert_eq!(check_free(&folder), Ok(()));
    std::fs::write(folder.join("note"), "").unwrap();
    assert!(check_free(&folder).unwrap_err().ends_with("the folder is not empty; expected a name that is free"));
    assert!(check_free(&folder.join("note")).unwrap_err().ends_with("expected a name that is free"));
}
