//! Files and folders that are plugins, and those that are not.
#![allow(clippy::unwrap_used)]

mod common;

use common::{competition, episode, host, repository};
use querl_plugin::{HostOptions, PluginHost};
use std::path::Path;

fn refusal(path: &Path) -> String {
    host().load(path).unwrap_err().to_string()
}

fn file(folder: &tempfile::TempDir, bytes: &[u8]) -> std::path::PathBuf {
    let path = folder.path().join("x.wasm");
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn component_file_loads_like_its_folder() {
    let host = host();
    let from_folder = host.load(&repository().join("plugins/reward-competition")).unwrap();
    let from_file = host.load(from_folder.path()).unwrap();
    assert_eq!((from_file.id(), from_file.version()), ("reward-competition", "0.2.0"));
    assert_eq!(from_file.digest(), from_folder.digest());
    assert_eq!(from_file.digest().len(), 64);
}

#[test]
fn files_that_are_no_component_are_reported_by_kind() {
    let folder = tempfile::tempdir().unwrap();
    assert!(refusal(&folder.path().join("none.wasm")).contains("No such file"));
    assert!(refusal(folder.path()).contains("holds no Cargo.toml"));
    assert!(refusal(&file(&folder, b"")).ends_with("it is not WebAssembly; expected a component"));
    assert!(refusal(&file(&folder, b"\x7fELF\x02\x01\x01\0")).ends_with("it is native code; expected a component"));
    assert!(refusal(&file(&folder, b"\0asm\x0d\0\x01\0")).contains("it exports none of `prompts`"));
    assert!(refusal(&file(&folder, b"\0asm\x0e\0\x01\0")).ends_with("it is not WebAssembly; expected a component"));
}

#[test]
fn source_folder_is_built_again_when_its_source_is_newer() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("src")).unwrap();
    let manifest = "[package]\nname = 'no-plugin'\nedition = '2024'\n[lib]\ncrate-type = ['cdylib']\n[workspace]\n";
    std::fs::write(folder.path().join("Cargo.toml"), manifest).unwrap();
    std::fs::write(folder.path().join("src/lib.rs"), "pub fn nothing() {}").unwrap();
    let built = refusal(folder.path());
    assert!(built.contains("it exports none of `prompts`"), "{built}");
    std::fs::write(folder.path().join("src/lib.rs"), "pub fn nothing() -> u32 { \"text\" }").unwrap();
    let broken = refusal(folder.path());
    assert!(broken.contains("cargo could not build it:") && broken.contains("mismatched types"), "{broken}");
}

/// Symptom: a plugin.toml with limits that are too high was refused only after the build.
#[test]
fn limits_above_those_of_the_host_are_refused_before_a_build() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = "[plugin]\nid = 'x'\nversion = '0.1.0'\ncontract = '0.2.0'\nkinds = ['reward']\ndescription = 'x'\nlicense = 'MIT'\n\
                    range = [0, 1]\n[limits]\nmemory_bytes = 5000000000\n";
    std::fs::write(folder.path().join("plugin.toml"), manifest).unwrap();
    let script = "[package]\nname = 'x'\nedition = '2024'\n[lib]\ncrate-type = ['cdylib']\n[workspace]\n";
    std::fs::write(folder.path().join("Cargo.toml"), script).unwrap();
    std::fs::create_dir(folder.path().join("src")).unwrap();
    std::fs::write(folder.path().join("src/lib.rs"), "this does not compile").unwrap();
    let refused = refusal(folder.path());
    let expected = "asks for a memory_bytes of 5000000000, and this host allows 268435456; raise";
    assert!(refused.contains(expected), "{refused}");
}

#[test]
fn compiled_code_is_kept_and_used() {
    let folder = tempfile::tempdir().unwrap();
    let options = || HostOptions { cache_dir: Some(folder.path().to_owned()), ..HostOptions::default() };
    let scores = || {
        let reward = competition(&PluginHost::new(options()).unwrap());
        reward.score_batch(&[episode("a", "好")]).unwrap()
    };
    let fresh = scores();
    let kept: Vec<_> =
        std::fs::read_dir(folder.path().join("compiled")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(kept.len(), 1);
    assert_eq!(scores(), fresh, "from the cache");
}

#[cfg(unix)]
#[test]
fn cache_folder_is_private_and_one_that_others_can_write_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let load = |base: &Path| {
        let host = PluginHost::new(HostOptions { cache_dir: Some(base.to_owned()), ..HostOptions::default() }).unwrap();
        host.load(&repository().join("plugins/reward-competition")).unwrap();
    };
    let private = folder.path().join("private");
    load(&private);
    assert_eq!(std::fs::metadata(private.join("compiled")).unwrap().permissions().mode() & 0o777, 0o700);
    let open = folder.path().join("open");
    std::fs::create_dir_all(open.join("compiled")).unwrap();
    std::fs::set_permissions(open.join("compiled"), std::fs::Permissions::from_mode(0o777)).unwrap();
    load(&open);
    assert_eq!(std::fs::read_dir(open.join("compiled")).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn cache_below_a_folder_that_others_can_write_is_not_used_unless_that_is_sticky() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let above = folder.path().join("above");
    std::fs::create_dir(&above).unwrap();
    let n_kept = |mode: u32| {
        std::fs::set_permissions(&above, std::fs::Permissions::from_mode(mode)).unwrap();
        let base = above.join(format!("{mode:o}"));
        let (warnings, _) = common::Lines::of(|| common::guest(&common::host_in(&base), "ordinary"));
        assert_eq!(warnings.contains("others than its owner can write"), mode & 0o022 != 0 && mode & 0o1000 == 0);
        std::fs::read_dir(base.join("compiled")).unwrap().count()
    };
    assert_eq!([0o755, 0o775, 0o777, 0o1777].map(n_kept), [1, 0, 0, 1]);
}

#[test]
fn calls_work_outside_and_inside_an_async_runtime() {
    let batch = [episode("a", "好")];
    let panics = common::guest(&host(), "panics");
    let reward = competition(&host());
    let outside = reward.score_batch(&batch).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    runtime.block_on(async {
        // Called on the runtime's thread and as in a stage, also with a guest that writes to stderr.
        assert_eq!(reward.score_batch(&batch).unwrap(), outside);
        let on_worker = tokio::spawn(async move {
            let plain = tokio::task::block_in_place(|| reward.score_batch(&[episode("a", "好")]).unwrap());
            let direct = panics.score_batch(&[episode("p", "panic")]).unwrap_err();
            (plain, direct.to_string())
        });
        let (plain, fault) = on_worker.await.unwrap();
        assert_eq!(plain, outside);
        assert!(fault.contains("panicked"), "{fault}");
    });
}

/// Symptom: the memory of a component in JavaScript held the path of the author's folder. Needs `plugins/setup.sh`.
#[cfg(unix)]
#[test]
fn component_in_javascript_holds_no_folder_of_its_author() {
    let packages = repository().join("plugins/node_modules");
    if !packages.join("@bytecodealliance/componentize-js").is_dir() {
        return;
    }
    let folder = tempfile::Builder::new().prefix("secret-author-").tempdir().unwrap();
    let plugin = folder.path().canonicalize().unwrap();
    let copy = |from: &str, to: &str| {
        let to = plugin.join(to);
        std::fs::create_dir_all(&to).unwrap();
        for entry in std::fs::read_dir(repository().join(from)).unwrap().flatten() {
            if entry.path().is_file() {
                std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
            }
        }
    };
    copy("plugins/reward-brevity", "");
    copy("wit/0.2.0", "vendor/wit");
    copy("sdk/javascript", "vendor/querl-sdk");
    copy("sdk/javascript/guest", "vendor/querl-sdk/guest");
    std::os::unix::fs::symlink(packages, plugin.join("node_modules")).unwrap();
    let package = r##"{"name": "x", "type": "module", "imports": {"#querl-sdk": "./vendor/querl-sdk/index.js"}}"##;
    std::fs::write(plugin.join("package.json"), package).unwrap();
    let component = std::fs::read(querl_plugin::build(&plugin).unwrap().component).unwrap();
    let name = plugin.file_name().unwrap().as_encoded_bytes();
    assert!(!component.windows(name.len()).any(|bytes| bytes == name));
}
