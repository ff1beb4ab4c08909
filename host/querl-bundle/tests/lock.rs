//! The lock file, and the differences that it reports for changed plugins.
#![allow(clippy::unwrap_used)]

mod common;

use querl_bundle::lock::{Difference, LockEntry, LockFile, LockKind, LockSource};

fn entry(role: &str, id: &str, digit: char) -> LockEntry {
    LockEntry {
        role: role.into(),
        id: id.into(),
        version: "0.1.0".parse().unwrap(),
        path: format!("plugins/{id}-0.1.0.querl").into(),
        source: LockSource::Bundle,
        sha256: digit.to_string().repeat(64),
        bundle: Some("b".repeat(64)),
        manifest: None,
        signed_by: None,
    }
}

fn locked() -> LockFile {
    LockFile {
        entries: vec![entry("prompt", "tenant-chengla", '0'), entry("reward", "reward-brevity", '1')],
        changes: vec![],
    }
}

fn messages(differences: &[Difference]) -> Vec<String> {
    differences.iter().map(Difference::to_string).collect()
}

#[test]
fn lock_file_written_and_read_again_is_the_same() {
    let mut file = locked();
    let key = querl_bundle::SigningKey::generate().unwrap().public();
    file.entries[0].signed_by = Some(key.to_string());
    file.entries[1].source = LockSource::Folder;
    file.entries[1].bundle = None;
    file.entries[1].manifest = Some("d".repeat(64));
    // Regression, found by fuzzing: a backslash in a name was written as a slash.
    #[cfg(unix)]
    file.entries[1].path.push("a\\b");
    assert_eq!(LockFile::parse(&file.to_text(LockKind::Run), "querl.lock").unwrap(), file);
    file.accept(vec![entry("prompt", "tenant-chengla", '2')], "2026-11-20T14:00:00Z");
    let text = file.to_text(LockKind::Run);
    assert_eq!(LockFile::parse(&text, "querl.lock").unwrap(), file, "{text}");
    assert_eq!(LockFile::parse(&text, "querl.lock").unwrap().to_text(LockKind::Run), text);
    assert_eq!(
        LockFile::parse(&LockFile::default().to_text(LockKind::Run), "querl.lock").unwrap(),
        LockFile::default()
    );
}

#[test]
fn the_first_line_fits_its_place() {
    let first = |place| locked().to_text(place).lines().next().unwrap().to_owned();
    assert_eq!(first(LockKind::Run), "# Written by querl: the plugins of this run. A plugin that changed is refused.");
    let expected = "# Written by querl: the bundles of this project; keep this file in version control. A plugin that changed is refused.";
    assert_eq!(first(LockKind::Project), expected);
    assert_eq!(LockFile::parse(&locked().to_text(LockKind::Project), "querl.lock").unwrap(), locked());
}

#[test]
fn plugins_as_locked_make_no_difference() {
    let mut found = locked().entries;
    assert_eq!(locked().check(&found), []);
    found.reverse();
    found[0].path = "elsewhere/x.querl".into();
    assert_eq!(locked().check(&found), []);
}

#[test]
fn changed_plugin_is_reported_with_both_digests_and_the_remedy() {
    let mut found = locked().entries;
    found[1].sha256 = "2".repeat(64);
    found[1].version = "0.2.0".parse().unwrap();
    assert_eq!(
        messages(&locked().check(&found)),
        [
            "reward plugin `reward-brevity` changed from 0.1.0 (component 111111111111, bundle bbbbbbbbbbbb) to 0.2.0 (component \
          222222222222, bundle bbbbbbbbbbbb); bring back 0.1.0 to plugins/reward-brevity-0.1.0.querl, or accept the change with \
          `--accept-plugin-change`"
        ]
    );
}

#[test]
fn a_bundle_of_another_digest_is_a_change_though_its_component_is_the_same() {
    let mut found = locked().entries;
    found[0].bundle = Some("c".repeat(64));
    assert!(matches!(locked().check(&found)[..], [Difference::Changed { .. }]));
    found[0].bundle = None;
    assert!(matches!(locked().check(&found)[..], [Difference::Changed { .. }]));
}

fn key() -> String {
    querl_bundle::SigningKey::generate().unwrap().public().to_string()
}

#[test]
fn a_signer_that_is_gone_or_another_is_a_change_and_a_new_one_is_none() {
    let (first, second) = (key(), key());
    let signed = |by: Option<&String>| LockEntry { signed_by: by.cloned(), ..entry("reward", "reward-brevity", '1') };
    let locked = LockFile { entries: vec![signed(Some(&first))], changes: vec![] };
    assert_eq!(locked.check(&[signed(Some(&first))]), []);
    let what = "component 111111111111, bundle bbbbbbbbbbbb";
    for (found, to) in [(signed(None), "not signed".to_owned()), (signed(Some(&second)), format!("signed by {second}"))]
    {
        assert_eq!(
            messages(&locked.check(&[found])),
            [format!(
                "reward plugin `reward-brevity` changed from 0.1.0 ({what}, signed by {first}) to 0.1.0 ({what}, {to}); bring back \
                 the bundle with that signature to plugins/reward-brevity-0.1.0.querl and its key to `plugins.trusted_keys`, or \
                 accept the change with `--accept-plugin-change`"
            )]
        );
    }
    let mut unsigned = LockFile { entries: vec![signed(None)], changes: vec![] };
    assert_eq!(unsigned.accept(vec![signed(Some(&first))], "2026-11-20T14:00:00Z"), []);
    assert_eq!((unsigned.entries[0].signed_by.as_ref(), unsigned.changes.len()), (Some(&first), 0));
    let accepted = &mut locked.clone();
    accepted.accept(vec![signed(None)], "2026-11-20T14:00:00Z");
    assert_eq!(accepted.changes[0].to, format!("0.1.0 ({what}, not signed)"));
}

/// The `[limits]` of a folder's manifest change which items are dropped, even if the component is the same.
#[test]
fn a_changed_manifest_of_a_folder_is_a_change() {
    let folder = |manifest: Option<char>| LockEntry {
        source: LockSource::Folder,
        bundle: None,
        path: "plugins/reward-brevity".into(),
        manifest: manifest.map(|digit| digit.to_string().repeat(64)),
        ..entry("reward", "reward-brevity", '1')
    };
    let locked = LockFile { entries: vec![folder(Some('e'))], changes: vec![] };
    assert_eq!(locked.check(&[folder(Some('e'))]), []);
    assert_eq!(
        messages(&locked.check(&[folder(Some('f'))])),
        [
            "reward plugin `reward-brevity` changed from 0.1.0 (component 111111111111, manifest eeeeeeeeeeee) to 0.1.0 (component \
          111111111111, manifest ffffffffffff); bring back its plugin.toml to plugins/reward-brevity, or accept the change with \
          `--accept-plugin-change`"
        ]
    );
    assert!(
        messages(&locked.check(&[folder(None)]))[0]
            .contains("to 0.1.0 (component 111111111111, no manifest); bring back")
    );
    let of_earlier_version = LockFile { entries: vec![folder(None)], changes: vec![] };
    assert_eq!(of_earlier_version.check(&[folder(Some('f'))]), []);
}

#[test]
fn plugins_that_came_and_went_are_reported() {
    let found = [entry("prompt", "tenant-chengla", '0'), entry("reward", "reward-other", '3')];
    assert_eq!(
        messages(&locked().check(&found)),
        [
            "reward plugin `reward-other` 0.1.0 (component 333333333333, bundle bbbbbbbbbbbb) is not in querl.lock; take it out \
             of the configuration, or accept the change with `--accept-plugin-change`",
            "reward plugin `reward-brevity` 0.1.0 (component 111111111111, bundle bbbbbbbbbbbb) is in querl.lock and no longer in \
             the configuration; put it back, or accept the change with `--accept-plugin-change`",
        ]
    );
}

#[test]
fn a_plugin_used_twice_is_compared_twice() {
    let twice = LockFile { entries: vec![entry("reward", "a", '1'), entry("reward", "a", '2')], changes: vec![] };
    assert_eq!(twice.check(&[entry("reward", "a", '2'), entry("reward", "a", '1')]), []);
    let differences = twice.check(&[entry("reward", "a", '2'), entry("reward", "a", '3')]);
    let [Difference::Changed { locked, found }] = &differences[..] else { panic!("{differences:?}") };
    assert_eq!((&locked.sha256[..1], &found.sha256[..1]), ("1", "3"));
    assert!(matches!(twice.check(&[entry("reward", "a", '1')])[..], [Difference::Removed { .. }]));
}

#[test]
fn accepted_change_is_recorded_and_no_longer_a_difference() {
    let mut file = locked();
    let found = vec![entry("prompt", "tenant-chengla", '0'), entry("reward", "reward-brevity", '9')];
    assert_eq!(file.accept(found.clone(), "2026-11-20T14:00:00Z").len(), 1);
    assert_eq!(file.check(&found), []);
    let [change] = &file.changes[..] else { panic!("{:?}", file.changes) };
    assert_eq!((change.role.as_str(), change.id.as_str()), ("reward", "reward-brevity"));
    assert!(change.from.contains("111111111111") && change.to.contains("999999999999"));
    assert_eq!(file.accept(found, "2026-11-20T15:00:00Z"), []);
    assert_eq!(file.changes.len(), 1);
}

/// A part of the lock file, its replacement, and a part of the error message.
const MISTAKES: &str = r#"
format = 1 => format = 2 => querl.lock:2: format is 2; this querl reads format 1; use a newer querl, or delete the file
format = 1 =>  => querl.lock:1: the key format is missing; expected a whole number
role = "prompt" => roll = "prompt" => querl.lock:5: unknown key plugin[0].roll; did you mean `role`?
role = "prompt" =>  => querl.lock:4: the key plugin[0].role is missing; expected what the plugin is used for, such as reward
version = "0.1.0" => version = "one" => querl.lock:7: plugin[0].version is "one"; expected a semantic version, such as 0.1.0
source = "bundle" => source = "zip" => querl.lock:9: plugin[0].source is "zip"; expected bundle, component or folder
sha256 = "0000 => sha256 = "000 => expected a SHA-256 digest: 64 of 0 to 9 and a to f
[[plugin]] => [plugin] => querl.lock:
source = "bundle" => source = "bundle"\nsigned_by = "me" => querl.lock:10: plugin[0].signed_by is "me"; expected `ed25519:` and 64 of 0 to 9 and a to f
"#;

#[test]
fn mistakes_are_reported_with_their_line() {
    for (text, expected) in common::replaced(&locked().to_text(LockKind::Run), MISTAKES) {
        let error = LockFile::parse(&text, "querl.lock").unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
