//! Bundles, and manifests in source folders: checks before a plugin is used.
#![allow(clippy::unwrap_used)]

mod common;

use common::{cache_dir, episode, host_with, load_guest, repository, wat};
use querl_bundle::{Bundle, PublicKey, SigningKey, pack, sign};
use querl_core::config::PluginLimits;
use querl_plugin::{HostOptions, PluginError, PluginHost, PluginPort, PluginSettings, Source};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const FOLDER: &str = "plugins/reward-competition";

fn host() -> PluginHost {
    host_with(PluginLimits::default())
}

fn host_that_trusts(keys: &[&SigningKey]) -> PluginHost {
    let trusted_keys = keys.iter().map(|key| key.public()).collect();
    PluginHost::new(HostOptions { trusted_keys, cache_dir: cache_dir(), ..HostOptions::default() }).unwrap()
}

fn component() -> Vec<u8> {
    std::fs::read(host().load(&repository().join(FOLDER)).unwrap().path()).unwrap()
}

/// A bundle of the first-party reward with a plugin.toml that was modified by `change`.
fn bundle(change: impl Fn(&str) -> String) -> (TempDir, PathBuf) {
    bundle_of(&component(), change)
}

/// As [`bundle`], of another component.
fn bundle_of(component: &[u8], change: impl Fn(&str) -> String) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let source = repository().join(FOLDER);
    for name in ["README.md", "LICENSE"] {
        std::fs::copy(source.join(name), folder.path().join(name)).unwrap();
    }
    let manifest = change(&std::fs::read_to_string(source.join("plugin.toml")).unwrap());
    std::fs::write(folder.path().join("plugin.toml"), manifest).unwrap();
    let path = folder.path().join("reward.querl");
    std::fs::write(&path, pack(folder.path(), component).unwrap()).unwrap();
    (folder, path)
}

/// The first-party reward of contract 0.1.
fn component_0_1() -> Vec<u8> {
    let path = repository().join("tests/plugins-0.1/reward-competition-0.1.0.querl");
    Bundle::open(&path).unwrap().component().to_vec()
}

fn manifest_0_1(manifest: &str) -> String {
    manifest.replace("\"0.2.0\"", "\"0.1.0\"")
}

/// The error for a bundle in which `old` was replaced by `new`.
fn refusal_with(old: &str, new: &str) -> String {
    let (_folder, path) = bundle(|manifest| {
        assert!(manifest.contains(old), "{manifest}");
        manifest.replacen(old, new, 1)
    });
    let message = host().load(&path).unwrap_err().to_string();
    let message = message.strip_prefix(&format!("plugin {}: ", path.display())).map(str::to_owned);
    message.unwrap_or_else(|| panic!("the path is not in front"))
}

#[test]
fn bundle_scores_as_its_folder_does() {
    let (_folder, path) = bundle(str::to_owned);
    let host = host();
    let bundled = host.load(&path).unwrap();
    let built = host.load(&repository().join(FOLDER)).unwrap();
    assert_eq!((bundled.source(), built.source()), (Source::Bundle, Source::Folder));
    assert_eq!((bundled.id(), bundled.version(), bundled.digest()), (built.id(), built.version(), built.digest()));
    assert_eq!((bundled.n_bytes(), bundled.path()), (component().len(), path.as_path()));
    assert_eq!(bundled.manifest().unwrap().plugin.range, Some((-1.0, 1.0)));
    let facts = bundled.bundle().unwrap();
    assert_eq!((facts.digest.len(), &facts.signed_by), (64, &None));
    assert!(built.bundle().is_none() && built.manifest().is_some());
    let score = |plugin| {
        host.open(plugin, &PluginSettings::new(), PluginPort::reward()).unwrap().score_batch(&[episode("a", "好")])
    };
    assert_eq!(score(&bundled).unwrap(), score(&built).unwrap());
}

#[test]
fn component_alone_has_no_manifest() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.wasm");
    std::fs::write(&path, component()).unwrap();
    let plugin = host().load(&path).unwrap();
    assert_eq!(plugin.source(), Source::Component);
    assert!(plugin.manifest().is_none() && plugin.bundle().is_none());
}

#[test]
fn what_the_manifest_says_must_be_so() {
    let differs = |key: &str, message: &str, is: &str| {
        format!("its plugin.toml says `{message}` under `plugin.{key}`; the component says `{is}`")
    };
    let id = ("id = \"reward-competition\"", "id = \"reward-other\"");
    assert_eq!(refusal_with(id.0, id.1), differs("id", "reward-other", "reward-competition"));
    let version = ("version = \"0.2.0\"", "version = \"0.2.1\"");
    assert_eq!(refusal_with(version.0, version.1), differs("version", "0.2.1", "0.2.0"));
    let contract = ("contract = \"0.2.0\"", "contract = \"0.1.0\"");
    assert_eq!(refusal_with(contract.0, contract.1), differs("contract", "0.1.x", "0.2.x"));
    let kinds = ("kinds = [\"reward\"]", "kinds = [\"reward\", \"filter\"]");
    assert_eq!(refusal_with(kinds.0, kinds.1), differs("kinds", "filter, reward", "reward"));
    let range = ("range = [-1.0, 1.0]", "range = [0, 1]");
    assert_eq!(refusal_with(range.0, range.1), differs("range", "0 to 1", "-1 to 1"));
    assert_eq!(
        refusal_with("maximum = 1e6", "maximum = 2"),
        "its plugin.toml says a number from 0 to 2, by default 0.35 for the setting `weight_judge`; the component says a number \
         from 0 to 1000000, by default 0.35"
    );
    // A component of contract 0.1 describes neither range nor settings.
    let (_folder, path) =
        bundle_of(&component_0_1(), |manifest| manifest_0_1(manifest).replace("[-1.0, 1.0]", "[0, 1]"));
    let message = host().load(&path).unwrap_err().to_string();
    assert!(
        message.ends_with(
            ": its plugin.toml says that its range is 0 to 1; under default settings the component declares -1 to 1"
        ),
        "{message}"
    );
}

#[test]
fn settings_are_checked_against_the_manifest_before_the_plugin_sees_them() {
    // The plugin accepts up to a million, but contract 0.1 cannot describe that.
    let (_folder, path) =
        bundle_of(&component_0_1(), |manifest| manifest_0_1(manifest).replacen("maximum = 1e6", "maximum = 2", 1));
    let host = host();
    let plugin = host.load(&path).unwrap();
    let refused = |settings: &str| {
        let settings = toml::from_str(settings).unwrap();
        host.open(&plugin, &settings, PluginPort::reward()).err().unwrap().to_string()
    };
    let expected = "plugin reward-competition 0.1.0: setting `weight_judge`: expected a number from 0 to 2, got 3";
    assert_eq!(refused("weight_judge = 3"), expected);
    assert_eq!(
        refused("weight_jugde = 1"),
        "plugin reward-competition 0.1.0: setting `weight_jugde`: the plugin knows no such setting; did you mean \
         `weight_judge`?"
    );
    host.open(&plugin, &toml::from_str("weight_judge = 2").unwrap(), PluginPort::reward()).unwrap();
}

#[test]
fn plugin_runs_under_the_limits_it_asks_for() {
    let low = |manifest: &str| {
        let (text, _) = manifest.split_once("[limits]").unwrap();
        format!("{text}[limits]\nfuel_per_item = 7\nmemory_bytes = 4194304\n")
    };
    let (_folder, path) = bundle(low);
    let limits = PluginLimits { fuel_per_call: 100, ..PluginLimits::default() };
    let message = host_with(limits).load(&path).unwrap_err();
    assert!(matches!(message, PluginError::Fault(_)));
    assert!(message.to_string().contains("(`limits.fuel_per_item` of its plugin.toml)"), "{message}");
    let plugin = host().load(&path).unwrap();
    assert_eq!((plugin.limits().fuel_per_item, plugin.limits().memory_bytes), (7, 4_194_304));
    assert_eq!(plugin.limits().output_bytes, PluginLimits::default().output_bytes);
}

#[test]
fn plugin_that_asks_for_more_than_the_host_allows_is_refused() {
    let more = |manifest: &str| {
        let (text, _) = manifest.split_once("[limits]").unwrap();
        format!("{text}[limits]\ntimeout_ms = 3600000\n")
    };
    let (_folder, path) = bundle(more);
    let message = host().load(&path).unwrap_err().to_string();
    assert!(
        message.ends_with(
            "asks for a timeout_ms of 3600000, and this host allows 5000; raise `plugins.limits.timeout_ms` to 3600000 or more"
        ),
        "{message}"
    );
}

#[test]
fn damaged_bundle_is_refused_with_its_part() {
    let (_folder, path) = bundle(str::to_owned);
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error = host().load(&path).unwrap_err();
    assert!(matches!(error, PluginError::Bundle(_)));
    assert!(error.to_string().starts_with(&format!("plugin {}: ", path.display())), "{error}");
}

fn signed(path: &Path, key: &SigningKey) {
    let bytes = sign(&std::fs::read(path).unwrap(), key).unwrap();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn where_keys_are_trusted_only_their_bundles_run() {
    let (ours, theirs) = (SigningKey::generate().unwrap(), SigningKey::generate().unwrap());
    let (_folder, path) = bundle(str::to_owned);
    let host = host_that_trusts(&[&ours]);
    let message = |path: &Path| {
        let error = host.load(path).unwrap_err();
        assert!(matches!(error, PluginError::Untrusted { .. }), "{error}");
        error.to_string()
    };
    let (name, key) = (path.display(), ours.public());
    let end = format!("expected a signature of {key} (`plugins.trusted_keys`)");
    assert_eq!(message(&path), format!("plugin {name}: not signed; {end}"));
    signed(&path, &theirs);
    assert_eq!(message(&path), format!("plugin {name}: signed by {}; {end}", theirs.public()));
    let folder = repository().join(FOLDER);
    let bare = |what: &str| format!("it is {what}, which nobody signs; expected a bundle with a signature of {key}");
    assert!(message(&folder).contains(&bare("a folder with source")), "{}", message(&folder));
    let file = tempfile::Builder::new().suffix(".wasm").tempfile().unwrap();
    std::fs::write(file.path(), component()).unwrap();
    assert!(message(file.path()).contains(&bare("a component")), "{}", message(file.path()));

    signed(&path, &ours);
    let trusted =
        |host: &PluginHost| -> PublicKey { host.load(&path).unwrap().bundle().unwrap().signed_by.clone().unwrap() };
    assert_eq!(trusted(&host), key);
    assert_eq!(trusted(&host_that_trusts(&[&SigningKey::generate().unwrap(), &theirs])), theirs.public());
}

#[test]
fn without_trusted_keys_the_first_signer_is_reported() {
    let key = SigningKey::generate().unwrap();
    let (_folder, path) = bundle(str::to_owned);
    signed(&path, &key);
    assert_eq!(host().load(&path).unwrap().bundle().unwrap().signed_by, Some(key.public()));
}

#[test]
fn guests_without_a_manifest_load_from_their_folders() {
    let plugin = load_guest(&host(), "works").unwrap();
    assert!(plugin.manifest().is_none());
}

/// A folder with a plugin in JavaScript that needs no build: its component is `component`.
fn built_folder(component: &[u8], more: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let manifest = "[plugin]\nid = 'ordinary'\nversion = '0.1.0'\ncontract = '0.1.0'\nkinds = ['reward']\nrange = [0, 1]\n\
                    description = 'x'\nlicense = 'MIT'\n[build]\nlanguage = 'javascript'\n";
    let files = [
        ("plugin.toml", format!("{manifest}{more}").into_bytes()),
        ("plugin.js", Vec::new()),
        ("vendor/querl-sdk/index.js", Vec::new()),
        ("vendor/wit/worlds.wit", Vec::new()),
        ("dist/ordinary.wasm", component.to_vec()),
    ];
    for (name, bytes) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    folder
}

/// Regression: the digest that a folder claimed for its component determined the name under which its code was cached.
#[test]
fn code_is_kept_under_the_digest_of_its_bytes_whatever_plugin_toml_says() {
    let (ours, theirs) = (common::wat::component("ordinary"), common::wat::component("divides-by-zero"));
    let digest = |bytes: &[u8]| querl_core::fsx::digest_hex(bytes);
    let claim = format!("[bundle]\nformat = 1\ncomponent = '{}'\ncomponent_bytes = {}\n", digest(&ours), ours.len());
    let (posing, cache) = (built_folder(&theirs, &claim), tempfile::tempdir().unwrap());
    let message = common::host_in(cache.path()).load(posing.path()).unwrap_err();
    assert!(matches!(message, PluginError::Manifest { .. }), "{message}");
    assert!(message.to_string().contains("it has a section `[bundle]`, which `querl plugin pack` writes"), "{message}");
    assert_eq!(std::fs::read_dir(cache.path().join("compiled")).unwrap().count(), 0);

    let honest = built_folder(&ours, "");
    let plugin = common::host_in(cache.path()).load(honest.path()).unwrap();
    assert_eq!(plugin.digest(), digest(&ours));
    let kept = std::fs::read_dir(cache.path().join("compiled")).unwrap().next().unwrap().unwrap().file_name();
    assert!(kept.to_str().unwrap().starts_with(&digest(&ours)), "{kept:?}");
}

#[cfg(unix)]
#[test]
fn plugin_toml_that_leads_nowhere_is_an_error_and_not_none() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(folder.path().join("gone"), folder.path().join("plugin.toml")).unwrap();
    std::fs::write(folder.path().join("Cargo.toml"), "").unwrap();
    let message = host().load(folder.path()).unwrap_err().to_string();
    assert!(message.contains("plugin.toml: No such file"), "{message}");
}

#[cfg(unix)]
#[test]
fn only_a_file_is_read_as_a_component() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("x.wasm");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let message = host().load(&pipe).unwrap_err().to_string();
    assert!(message.ends_with("x.wasm: it is not a file; expected a component"), "{message}");
}

#[test]
fn manifest_names_what_a_component_of_contract_0_2_says_and_imports() {
    const FINE: &str = "[plugin]\nid = \"counts-tokens\"\nversion = \"0.1.0\"\ncontract = \"0.2.0\"\nkinds = [\"reward\"]\n\
        description = \"x\"\nlicense = \"MIT\"\nrange = [0.0, 1.0]\nhost_functions = [\"tokens\"]\n";
    let component = wat::component("counts-tokens");
    let load = |manifest: &str| {
        let (_folder, path) = bundle_of(&component, |_| manifest.to_owned());
        host().load(&path).map(|plugin| plugin.id().to_owned()).map_err(|error| error.to_string())
    };
    assert_eq!(load(FINE).unwrap(), "counts-tokens");
    for (old, new, expected) in [
        ("host_functions = [\"tokens\"]", "", "says `` under `plugin.host_functions`; the component imports `tokens`"),
        (
            "[\"tokens\"]",
            "[\"words\", \"tokens\"]",
            "says `tokens, words` under `plugin.host_functions`; the component",
        ),
        ("0.0, 1.0", "0.0, 2.0", "says `0 to 2` under `plugin.range`; the component says `0 to 1`"),
        ("[\"reward\"]", "[\"group-reward\"]", "says `group-reward` under `plugin.kinds`; the component says `reward`"),
        (
            "host_functions",
            "[settings.x]\ntype = \"text\"\n#",
            "the setting `x`, which the component does not describe",
        ),
    ] {
        let message = load(&FINE.replacen(old, new, 1)).unwrap_err();
        assert!(message.contains(expected), "{message}");
    }
}
