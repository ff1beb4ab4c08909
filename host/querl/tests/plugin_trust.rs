//! Untrusted plugins: which commands build a folder, and which compare pins and keys.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use support::{CommandOutput, Project, repository};

const BUNDLE: &str = "reward-competition-0.2.0.querl";

/// A project in whose PATH `cargo` is a program that only creates the file `built`.
struct Watched(Project);

impl Watched {
    fn new() -> Self {
        let project = Project::new();
        std::fs::create_dir(project.path("bin")).unwrap();
        let built = project.path("built");
        project.write("bin/cargo", &format!("#!/bin/sh\necho >> '{}'\nexit 1\n", built.display()));
        std::fs::set_permissions(project.path("bin/cargo"), std::fs::Permissions::from_mode(0o755)).unwrap();
        Self(project)
    }

    fn querl(&self, args: &[&str]) -> CommandOutput {
        let mut command = self.0.command(args);
        command.env("PATH", self.0.path("bin"));
        CommandOutput::of(command.output().unwrap(), self.0.folder.path())
    }

    /// Asserts exit code 2 and that nothing was built. Returns the message.
    fn refusal(&self, args: &[&str]) -> String {
        let output = self.querl(&[args, &["-q"]].concat());
        assert_eq!((output.code, output.stderr.lines().count()), (Some(2), 1), "{args:?}: {output:#?}");
        assert!(!self.0.path("built").exists(), "{args:?} built a folder");
        output.stderr.trim_end().strip_prefix("error: ").unwrap().to_owned()
    }
}

/// Writes the source of a reward, which is never built.
fn write_source(folder: &Path) {
    let from = repository().join("plugins/reward-competition");
    std::fs::create_dir_all(folder.join("src")).unwrap();
    for file in ["plugin.toml", "README.md", "LICENSE", "src/lib.rs"] {
        std::fs::copy(from.join(file), folder.join(file)).unwrap();
    }
    let manifest = "[package]\nname = \"reward-competition\"\nversion = \"0.1.0\"\n[workspace]\n";
    std::fs::write(folder.join("Cargo.toml"), manifest).unwrap();
}

const PINNED: &str = "plugins/reward-competition";

fn reward() -> String {
    repository().join(PINNED).display().to_string()
}

/// Symptom: a folder named `x.querl` was built, so that naming a bundle executed code of its author.
#[test]
fn a_folder_with_the_name_of_a_file_is_refused_by_every_command_and_never_built() {
    let watched = Watched::new();
    let project = &watched.0;
    let episodes = repository().join("examples/hello-reward/episodes.jsonl").display().to_string();
    write_source(&project.path("source"));
    std::os::unix::fs::symlink(project.path("source"), project.path("link.querl")).unwrap();
    for name in ["x.querl", "x.wasm", "X.QUERL", "link.querl"] {
        if !project.path(name).exists() {
            write_source(&project.path(name));
        }
        let config = project.read("querl.toml").replace(&reward(), name);
        project.write("other.toml", &config);
        let slash = format!("{name}/");
        let cases: [&[&str]; 9] = [
            &["plugin", "inspect", name],
            &["plugin", "inspect", &slash],
            &["plugin", "test", name],
            &["plugin", "bench", name],
            &["plugin", "build", name],
            &["plugin", "replay", &episodes, "--plugin", name],
            &["plugin", "list", "other.toml"],
            &["config", "check", "other.toml"],
            &["run", "other.toml"],
        ];
        for args in cases {
            let message = watched.refusal(args);
            assert!(message.contains("it is a folder with the name of a `.") && message.contains(name), "{message}");
        }
    }
}

#[test]
fn a_command_that_looks_at_plugins_says_how_to_build_one_and_does_not() {
    let watched = Watched::new();
    let project = &watched.0;
    write_source(&project.path("source"));
    project.edit(&reward(), "source");
    let cases: [&[&str]; 3] =
        [&["plugin", "inspect", "source"], &["plugin", "list", "querl.toml"], &["config", "check", "querl.toml"]];
    for args in cases {
        let message = watched.refusal(args);
        assert!(message.contains("build it with `querl plugin build ") && message.contains("source`"), "{message}");
    }
    let said = watched.querl(&["run", "querl.toml", "--dry-run"]).ok().stdout;
    let line = "  built or fetched first, prices unknown until then (`querl plugin build`): source\n";
    assert!(said.ends_with(line), "{said}");
    let estimate: serde_json::Value =
        serde_json::from_str(&watched.querl(&["run", "querl.toml", "--dry-run", "--json"]).ok().stdout).unwrap();
    assert_eq!(estimate["unprepared_plugins"].as_array().unwrap().len(), 1, "{estimate}");
    assert!(!project.path("built").exists() && !project.path("run").exists());
    let said = watched.querl(&["run", "querl.toml"]).stderr;
    assert!(project.path("built").exists(), "a run builds a folder that nothing pins");
    assert!(said.contains("building plugin source (cargo build, takes minutes the first time)\n"), "{said}");
}

/// Symptom: `config check` reported one unbuilt plugin at a time.
#[test]
fn unbuilt_plugins_are_named_together_with_one_command_that_builds_them() {
    let watched = Watched::new();
    let project = &watched.0;
    let filter = repository().join("plugins/filter-quality").display().to_string();
    let said = project.querl(&["plugin", "build", &filter, &reward()]).ok().stdout;
    assert_eq!(said.lines().filter(|line| line.ends_with("MB, up to date")).count(), 2, "{said}");
    for (plugin, folder) in [(reward(), "first"), (filter, "second")] {
        write_source(&project.path(folder));
        project.edit(&plugin, folder);
    }
    for args in [["config", "check", "querl.toml"], ["plugin", "list", "querl.toml"]] {
        let expected = "plugins second, first: their components are missing or older than their sources; build them with \
                        `querl plugin build second first`, which runs code of the folders";
        assert_eq!(watched.refusal(&args), expected);
    }
}

#[test]
fn trusted_keys_are_compared_before_any_folder_is_built() {
    let watched = Watched::new();
    let project = &watched.0;
    project.querl(&["plugin", "pack", &reward()]).ok();
    let key = project.querl(&["plugin", "sign", BUNDLE, "--new-key", "key.pem"]).ok().stdout;
    let key = key.trim_end().rsplit(' ').next().unwrap().to_owned();
    write_source(&project.path("source"));
    // The reward is signed; prompt and filter are folders.
    project.edit(&reward(), BUNDLE);
    project.edit(&repository().join("plugins/filter-quality").display().to_string(), "source");
    let message = watched.refusal(&["run", "querl.toml", &format!("--set=plugins.trusted_keys=[\"{key}\"]")]);
    assert!(message.contains("it is a folder with source, which nobody signs"), "{message}");
    assert!(!project.path("run").exists());
}

#[test]
fn pins_are_compared_before_any_folder_is_built() {
    let watched = Watched::new();
    let project = &watched.0;
    project.querl(&["plugin", "pack", &reward()]).ok();
    project.edit(&reward(), BUNDLE);
    project.querl(&["run", "querl.toml", "--to", "rewrite"]).ok();
    let locks = || [project.read("querl.lock"), project.read("run/querl.lock")];
    let before = locks();

    write_source(&project.path("source"));
    let config = project.read("querl.toml");
    project.edit(BUNDLE, "source");
    let message = watched.refusal(&["run", "querl.toml", "--to", "rewrite"]);
    let expected = "run/querl.lock: reward plugin source is a folder whose component is missing";
    assert!(message.starts_with(expected), "{message}");
    assert_eq!(watched.refusal(&["run", "querl.toml", "--dry-run"]), message, "a dry run is refused as the run is");
    let message = watched.refusal(&["run", "querl.toml", "--to", "rewrite", "--out", "other"]);
    assert!(message.starts_with("querl.lock: reward plugin `reward-competition` 0.2.0 "), "{message}");
    assert_eq!(locks(), before, "a refusal touches nothing");
    watched.querl(&["run", "querl.toml", "--to", "rewrite", "--accept-plugin-change", "-q"]);
    assert!(project.path("built").exists(), "an accepted change is built");

    // For a component without a bundle only the digest is compared.
    std::fs::remove_file(project.path("built")).unwrap();
    let component = repository().join("plugins/target/wasm32-wasip2/release/filter_quality.wasm");
    std::fs::copy(component, project.path("x.wasm")).unwrap();
    project.write("querl.toml", &config);
    project.edit(BUNDLE, "x.wasm");
    let message = watched.refusal(&["run", "querl.toml", "--to", "rewrite"]);
    assert!(message.contains("x.wasm (component ") && message.contains("is not the one that is pinned"), "{message}");
}

/// Symptom: a dry run succeeded although `--locked` refuses the command.
#[test]
fn locked_run_needs_a_lock_file_that_stays_as_it_is() {
    let project = Project::new();
    let run = ["run", "querl.toml", "--to", "rewrite", "--locked"];
    let refusal = |more: &[&str]| {
        let message = project.refusal(&[&run[..], more].concat(), 2);
        let others: [&[&str]; 3] = [&run, &["validate", "querl.toml", "--locked"], &["eval", "querl.toml", "--locked"]];
        for command in others {
            assert_eq!(project.refusal(&[command, more, &["--dry-run"]].concat(), 2), message, "{command:?}");
        }
        message
    };
    let message = refusal(&[]);
    assert!(message.starts_with("querl.lock: there is no such file; it pins bundles, and no plugin "), "{message}");
    project.querl(&["plugin", "pack", &reward()]).ok();
    project.edit(&reward(), BUNDLE);
    let message = refusal(&[]);
    let expected = "querl.lock: there is no such file; write it by running without `--locked`";
    assert!(message.starts_with(expected), "{message}");
    assert!(!project.path("run").exists() && !project.path("querl.lock").exists());

    project.querl(&run[..4]).ok();
    let lock = project.read("querl.lock");
    project.querl(&[&run[..], &["--dry-run"]].concat()).ok();
    project.querl(&run).ok();
    project.querl(&[&run[..], &["--out", "other"]].concat()).ok();
    let filter = repository().join("plugins/filter-quality").display().to_string();
    project.querl(&["plugin", "pack", &filter]).ok();
    project.edit(&filter, "filter-quality-0.2.0.querl");
    let message = refusal(&["--out", "third"]);
    assert!(message.starts_with("querl.lock: filter plugin `filter-quality` 0.2.0 "), "{message}");
    project.edit("filter-quality-0.2.0.querl", &filter);
    // The lock file would be changed: it lacks the new signature.
    let key = project.querl(&["plugin", "sign", BUNDLE, "--new-key", "key.pem"]).ok();
    assert!(key.stdout.contains("signed by"), "{key:#?}");
    let message = refusal(&["--out", "third"]);
    assert!(message.starts_with("querl.lock: would change: "), "{message}");
    assert_eq!(project.read("querl.lock"), lock);
}

/// A private key without the public key, as earlier versions of querl wrote it.
const OLD_KEY: &str = "-----BEGIN PRIVATE KEY-----\n\
                       MFECAQEwBQYDK2VwBCIEIMZM2qYgTyITyP0AdGqjrbzeMDVqgA2gD7RUUs91gmdE\n\
                       gSEAB15AU1iAKOiTamqzahQiF01w/H3SzFbsly9gEx/Tc0c=\n-----END PRIVATE KEY-----\n";
const OLD_PUBLIC: &str = "ed25519:075e4053588028e8936a6ab36a1422174d70fc7dd2cc56ec972f60131fd37347";

/// Output of `openssl`; `None` if it is not installed.
fn openssl(project: &Project, args: &[&str]) -> Option<String> {
    let output = std::process::Command::new("openssl").args(args).current_dir(project.folder.path()).output().ok()?;
    assert!(output.status.success(), "openssl {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Symptom: OpenSSL could not read the private keys, and no file contained the public key.
#[test]
fn keys_are_pem_files_that_openssl_reads_and_writes() {
    let project = Project::new();
    let key = project.querl(&["plugin", "sign", "--new-key", "key.pem"]).ok().stdout.trim_end().to_owned();
    // PKCS#8 version 1: SEQUENCE of 46 bytes, version 0, ed25519.
    let private = project.read("key.pem");
    assert!(private.lines().nth(1).unwrap().starts_with("MC4CAQAwBQYDK2VwBCIEI"), "{private}");
    let public = project.read("key.pem.pub");
    assert!(public.starts_with("-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEA"), "{public}");
    let taken = project.refusal(&["plugin", "sign", "--new-key", "key.pem"], 2);
    assert!(taken.starts_with("key.pem: is there already"), "{taken}");

    project.querl(&["plugin", "pack", &reward(), "--sign", "key.pem"]).ok();
    // Symptom: `chmod 600` was advised for a public key.
    let other = project.refusal(&["plugin", "sign", BUNDLE, "--key", "key.pem.pub"], 2);
    assert!(other.starts_with("key.pem.pub: holds a public key; name the private one"), "{other}");
    let other = project.refusal(&["plugin", "verify", BUNDLE, "--key", "key.pem"], 2);
    let expected = "key.pem: holds a private key; give the public one, which `querl plugin sign --new-key` writes";
    assert!(other.starts_with(expected), "{other}");
    project.querl(&["plugin", "verify", BUNDLE, "--key", "key.pem.pub"]).ok();
    project.querl(&["plugin", "verify", BUNDLE, "--key", &key]).ok();
    project.write("old.pem", OLD_KEY);
    std::fs::set_permissions(project.path("old.pem"), std::fs::Permissions::from_mode(0o600)).unwrap();
    let signed = project.querl(&["plugin", "sign", BUNDLE, "--key", "old.pem"]).ok();
    assert!(signed.stdout.ends_with(&format!("signed by {OLD_PUBLIC}\n")), "{signed:#?}");
    let expected = "`querl plugin sign --key old.pem --new-key NEW` writes the same key";
    assert!(signed.stderr.contains(expected), "{signed:#?}");
    let again = project.querl(&["plugin", "sign", "--key", "old.pem", "--new-key", "new.pem"]).ok();
    assert_eq!((again.stdout.trim_end(), again.stderr.as_str()), (OLD_PUBLIC, ""));

    for name in ["key.pem", "new.pem"] {
        let Some(of_private) = openssl(&project, &["pkey", "-in", name, "-pubout"]) else { return };
        assert_eq!(of_private, project.read(&format!("{name}.pub")));
        openssl(&project, &["pkey", "-pubin", "-in", &format!("{name}.pub"), "-noout"]);
    }
    openssl(&project, &["genpkey", "-algorithm", "ed25519", "-out", "theirs.pem"]);
    openssl(&project, &["pkey", "-in", "theirs.pem", "-pubout", "-out", "theirs.pub"]);
    std::fs::set_permissions(project.path("theirs.pem"), std::fs::Permissions::from_mode(0o600)).unwrap();
    project.querl(&["plugin", "sign", BUNDLE, "--key", "theirs.pem"]).ok();
    let verified = project.querl(&["plugin", "verify", BUNDLE, "--key", "theirs.pub"]).ok();
    assert!(verified.stdout.contains("\nsigned by ed25519:"), "{verified:#?}");
    let trust = format!("--set=plugins.trusted_keys=['''{}''']", project.read("theirs.pub"));
    let message = project.refusal(&["config", "check", "querl.toml", &trust], 2);
    assert!(message.contains("expected a bundle with a signature of ed25519:"), "{message}");
}
