//! The plugin commands: packing, signing and testing, and what a run does when a plugin changes.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::path::PathBuf;
use support::{Project, repository};

const BUNDLE: &str = "reward-competition-0.2.0.querl";

fn plugin(name: &str) -> String {
    repository().join("plugins").join(name).display().to_string()
}

/// Path of the component of the first-party plugin `name`; builds it if necessary.
fn component(project: &Project, name: &str) -> PathBuf {
    project.querl(&["plugin", "build", &plugin(name)]).ok();
    repository().join(format!("plugins/target/wasm32-wasip2/release/{}.wasm", name.replace('-', "_")))
}

/// A copy of the plugin's folder outside of the repository, with the built component, so that nothing is built again.
fn copy_of_plugin(project: &Project, name: &str) -> String {
    let (from, to) = (repository().join("plugins").join(name), project.path(name));
    for file in ["plugin.toml", "README.md", "LICENSE", "golden/competition.jsonl", "src/lib.rs"] {
        std::fs::create_dir_all(to.join(file).parent().unwrap()).unwrap();
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
    let manifest = format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\n[workspace]\n");
    std::fs::write(to.join("Cargo.toml"), manifest).unwrap();
    let built = component(project, name);
    let copied = to.join("target/wasm32-wasip2/release").join(built.file_name().unwrap());
    std::fs::create_dir_all(copied.parent().unwrap()).unwrap();
    let sources = format!("{}: {}\n", copied.display(), to.join("src/lib.rs").display());
    std::fs::write(copied.with_extension("d"), sources).unwrap();
    std::fs::write(copied, std::fs::read(built).unwrap()).unwrap();
    to.display().to_string()
}

#[test]
fn packing_twice_gives_the_same_bytes_and_a_signature_says_who_made_them() {
    let project = Project::new();
    let folder = plugin("reward-competition");
    let packed = project.querl(&["plugin", "pack", &folder]).ok();
    let digest = project.json(&["plugin", "verify", BUNDLE])["digest"].as_str().unwrap().to_owned();
    assert_eq!(packed.stdout, format!("{BUNDLE} {digest}\n"));
    let key = project.querl(&["plugin", "sign", "--new-key", "key.pem"]).ok().stdout.trim_end().to_owned();
    let other = project.querl(&["plugin", "sign", "--new-key", "other.pem"]).ok().stdout.trim_end().to_owned();
    assert!(key.starts_with("ed25519:") && key != other, "{key}");
    project.querl(&["plugin", "pack", &folder, "--out", "again"]).ok();
    let read = |name: &str| std::fs::read(project.path(name)).unwrap();
    assert!(read(BUNDLE) == read(&format!("again/{BUNDLE}")));

    let unsigned = project.refusal(&["plugin", "verify", BUNDLE, "--key", &key], 1);
    assert_eq!(unsigned, format!("{BUNDLE}: not signed; expected a signature of {key}"));
    let signed = project.querl(&["plugin", "sign", BUNDLE, "--key", "key.pem"]).ok();
    assert_eq!(signed.stdout, format!("{BUNDLE} {digest} signed by {key}\n"));
    project.querl(&["plugin", "pack", &folder, "--out", "again", "--sign", "key.pem"]).ok();
    assert!(read(BUNDLE) == read(&format!("again/{BUNDLE}")));
    let verified = project.json(&["plugin", "verify", BUNDLE, "--key", &other, "--key", &key]);
    assert_eq!((verified["signed_by"].as_str(), verified["digest"].as_str()), (Some(&*key), Some(&*digest)));
    let stranger = project.refusal(&["plugin", "verify", BUNDLE, "--key", &other], 1);
    assert_eq!(stranger, format!("{BUNDLE}: signed by {key}; expected a signature of {other}"));

    let found = project.json(&["plugin", "inspect", BUNDLE]);
    assert_eq!((found["id"].as_str(), found["bundle"].as_str()), (Some("reward-competition"), Some(&*digest)));
    assert_eq!((found["signers"][0].as_str(), &found["refused"]), (Some(&*key), &Value::Null));
    assert_eq!(found["settings"]["top1_share"]["default"], 0.6);
    assert!(found["files"]["plugin.wasm"].as_u64() > Some(1000) && found["files"]["golden/competition.jsonl"].is_u64());
    let exports = found["exports"].as_array().unwrap();
    assert!(exports.contains(&"querl:plugin/rewards@0.2.0".into()), "{exports:?}");

    // A component without a bundle describes itself.
    let bare = component(&project, "reward-competition").display().to_string();
    let bare = project.json(&["plugin", "inspect", &bare]);
    for fact in ["contract", "range", "inputs", "host_functions"] {
        assert_eq!(bare[fact], found[fact], "{fact}");
    }
    assert_eq!(bare["settings"]["top1_share"]["default"], 0.6);
    let inputs = serde_json::json!({ "baseline": true, "retrieval": true, "judgement": false });
    assert_eq!(bare["inputs"], inputs);

    let mut bytes = read(BUNDLE);
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(project.path(BUNDLE), bytes).unwrap();
    let tampered = project.refusal(&["plugin", "verify", BUNDLE], 1);
    assert!(tampered.starts_with(&format!("{BUNDLE}: ")) && tampered.contains("SHA-256"), "{tampered}");
    project.refusal(&["plugin", "inspect", BUNDLE], 2);
}

#[test]
fn what_breaks_a_golden_case_is_not_packed_and_fails_the_test() {
    let project = Project::new();
    let folder = copy_of_plugin(&project, "reward-competition");
    let golden = project.read("reward-competition/golden/competition.jsonl");
    let mut case: Value = serde_json::from_str(golden.lines().next().unwrap()).unwrap();
    case["expect"] = serde_json::json!({ "total": 0.123 });
    project.write("reward-competition/golden/competition.jsonl", &format!("{case}\n"));
    let name = format!("`golden: {}`", case["name"].as_str().unwrap());

    let said = project.querl(&["plugin", "pack", &folder]);
    assert_eq!((said.code, said.stdout.as_str()), (Some(1), ""), "{said:#?}");
    let last = said.stderr.lines().last().unwrap();
    assert!(last.starts_with("error: not packed: plugin reward-competition 0.2.0: 1 of "), "{last}");
    assert!(last.ends_with(&format!(" checks failed: {name}")) && said.stderr.contains("0.123"), "{said:#?}");
    assert!(!project.path(BUNDLE).exists());

    let said = project.querl(&["plugin", "test", &folder, "--json", "--junit", "report.xml", "--repeats", "3"]);
    let report: Value = serde_json::from_str(&said.stdout).unwrap();
    assert_eq!((said.code, &report["passed"]), (Some(1), &Value::Bool(false)), "{said:#?}");
    let junit = project.read("report.xml");
    assert!(junit.contains("<failure") && junit.contains("0.123"), "{junit}");
}

#[test]
fn a_plugin_without_golden_cases_is_packed_with_a_warning() {
    let project = Project::new();
    let folder = copy_of_plugin(&project, "reward-competition");
    let said = project.querl(&["plugin", "pack", &folder]).ok();
    assert!(!said.stderr.contains("golden cases"), "{said:#?}");
    std::fs::remove_dir_all(project.path("reward-competition/golden")).unwrap();
    let said = project.querl(&["plugin", "pack", &folder]).ok();
    let warned: Vec<&str> = said.stderr.lines().filter(|line| line.starts_with("warning: ")).collect();
    let start = "warning: reward-competition/golden: no golden cases";
    assert!(warned.len() == 1 && warned[0].starts_with(start) && warned[0].contains("`expect`"), "{said:#?}");
    assert!(project.path(BUNDLE).exists());
}

#[test]
fn first_party_plugin_passes_the_suite_and_shows_its_cost() {
    let project = Project::new();
    let said =
        project.querl(&["plugin", "test", &plugin("filter-quality"), "--repeats", "10", "--junit", "r.xml"]).ok();
    assert!(said.stdout.contains(" passed, 0 failed, "), "{said:#?}");
    assert!(!project.read("r.xml").contains("<failure"));
    let bench = project.json(&["plugin", "bench", &plugin("reward-competition"), "--batch", "1,4"]);
    let result = &bench["results"][1];
    assert_eq!((result["kind"].as_str(), result["batch"].as_u64()), (Some("reward"), Some(4)));
    assert!(result["fuel_per_item"]["p50"].as_f64() > Some(100.0), "{bench}");
    assert!(bench["cold_start_ms"].as_f64() > Some(0.0), "{bench}");
    let limits = &bench["limits"];
    assert!(limits["fuel_per_item"].as_f64() > result["fuel_per_item"]["max"].as_f64(), "{limits}");
}

/// A project whose reward is a bundle in its folder.
fn with_bundle() -> Project {
    let project = Project::new();
    let folder = copy_of_plugin(&project, "reward-competition");
    project.querl(&["plugin", "pack", &folder]).ok();
    project.edit(&format!("{}/plugins/reward-competition", repository().display()), BUNDLE);
    project
}

/// Changes the bundle: the same component with another README.
fn change_bundle(project: &Project) {
    project.write("reward-competition/README.md", "另一版说明\n");
    project.querl(&["plugin", "pack", "reward-competition"]).ok();
}

#[test]
fn a_changed_bundle_is_refused_until_it_is_accepted_and_the_report_says_so() {
    let project = with_bundle();
    let systems = ["--set", "eval.systems=[\"raw\", \"teacher\"]"];
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    let (of_run, of_project) = (project.read("run/querl.lock"), project.read("querl.lock"));
    assert_eq!(of_run.matches("[[plugin]]").count(), 3, "{of_run}");
    assert_eq!(of_run.matches("\nmanifest = ").count(), 2, "of the two source folders: {of_run}");
    assert_eq!(of_project.matches("[[plugin]]").count(), 1);
    assert!(of_project.contains(&format!("path = \"{BUNDLE}\"")));
    let rewrites = project.read("run/data/rewrites.jsonl");

    change_bundle(&project);
    let eval: Vec<&str> = [&["eval", "querl.toml"], &systems[..]].concat();
    let message = project.refusal(&eval, 2);
    assert!(message.starts_with("run/querl.lock: reward plugin `reward-competition` changed from 0.2.0 "), "{message}");
    assert!(message.contains("--accept-plugin-change"), "{message}");
    let elsewhere = project.refusal(&[&eval[..], &["--out", "other"]].concat(), 2);
    assert!(elsewhere.starts_with("querl.lock: reward plugin `reward-competition` changed from 0.2.0 "), "{elsewhere}");
    let now = [project.read("run/querl.lock"), project.read("querl.lock"), project.read("run/data/rewrites.jsonl")];
    assert_eq!(now, [of_run, of_project, rewrites], "a refusal touches nothing");

    let accepted = project.querl(&[&eval[..], &["--accept-plugin-change"]].concat()).ok();
    assert!(accepted.stderr.contains("accepted in place of 0.2.0"), "{accepted:#?}");
    for lock in ["run/querl.lock", "querl.lock"] {
        assert_eq!(project.read(lock).matches("[[change]]").count(), 1, "{lock}");
    }
    let note = "the reward plugin reward-competition changed within this run: from 0.2.0 (component ";
    assert!(accepted.stdout.contains(note), "{accepted:#?}");
    assert!(project.read("run/report.html").contains(note));
    let again = project.querl(&eval).ok();
    assert!(again.stderr.contains("eval: finished earlier, skipped"), "{again:#?}");

    // A run folder of an earlier version, whose results can still be reported.
    project.write("run/querl.lock", &project.read("run/querl.lock").replace("format = 1\n", ""));
    let reported = project.querl(&["report", "run"]).ok();
    let unknown = "the plugins of this run are not known: run/querl.lock:1: the key format is missing";
    assert!(reported.stdout.contains(unknown), "{reported:#?}");
    assert!(project.read("run/report.html").contains("the plugins of this run are not known: "));
}

#[test]
fn parts_of_several_rewards_have_names_that_differ() {
    let project = Project::new();
    let more = format!(
        "[[plugins.rewards]]\npath = {:?}\nweight = 0.5\nsettings = {{ win = 1.0 }}\n",
        plugin("reward-competition")
    );
    project.write("querl.toml", &(project.read("querl.toml") + &more));
    let listed = project.json(&["plugin", "list", "querl.toml"]);
    let labels: Vec<_> = listed.as_array().unwrap().iter().filter_map(|one| one["label"].as_str()).collect();
    assert_eq!(labels, ["reward-competition", "reward-competition#2"]);
    assert_eq!((listed[3]["weight"].as_f64(), listed[3]["source"].as_str()), (Some(0.5), Some("folder")));
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    project.querl(&["eval", "querl.toml", "--set", "eval.systems=[\"raw\", \"teacher\"]"]).ok();
    let evaluation: Value = serde_json::from_str(&project.read("run/eval.json")).unwrap();
    let components = evaluation["systems"]["raw"]["components"].as_object().unwrap();
    let page = project.read("run/report.html");
    for label in labels {
        let name = format!("{label}/total");
        assert!(components[&name]["mean"].is_number() && page.contains(&name.replace('/', "&#x2f;")), "{name}");
    }
}

#[test]
fn items_at_a_limit_are_dropped_and_counted_up_to_a_maximum() {
    let project = Project::new();
    // Components without a manifest request no limits.
    for name in ["tenant-fivedoctors", "filter-quality", "reward-competition"] {
        project.edit(&plugin(name), &component(&project, name).display().to_string());
    }
    let limits = |max_dropped: usize| {
        format!(
            "[plugins.limits]\nfuel_per_call = 40000\nfuel_per_item = 1\non_limit = \"drop\"\nmax_dropped = {max_dropped}\n"
        )
    };
    let config = project.read("querl.toml");
    project.write("querl.toml", &(config.clone() + &limits(5)));
    let said = project.querl(&["run", "querl.toml", "--to", "convert", "-q"]);
    assert_eq!((said.code, said.stderr.lines().count()), (Some(3), 1), "{said:#?}");
    assert!(said.stderr.contains("max_dropped"), "{said:#?}");
    project.write("querl.toml", &(config + &limits(1000)));
    let said = project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    assert!(said.stdout.contains("- plugin_limit"), "{said:#?}");
    assert!(project.read("run/data/dropped.jsonl").contains("\"code\":\"plugin_limit\""));
    let said = project.querl(&["eval", "querl.toml", "--set", "eval.systems=[\"raw\", \"teacher\"]"]).ok();
    let expected = " item(s) of the stage convert were dropped because a plugin hit a limit";
    assert!(said.stdout.contains(expected), "{said:#?}");
}

#[test]
fn a_secret_does_not_reach_a_plugin() {
    let project = Project::new();
    let text = project.read("querl.toml") + "settings = { clip = \"sk-very-secret-1\" }\n";
    project.write("querl.toml", &text);
    let output =
        project.command(&["run", "querl.toml", "-q"]).env("OPENAI_API_KEY", "sk-very-secret-1").output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    let expected = "error: plugins.rewards[0].settings.clip holds the value of the environment variable OPENAI_API_KEY; a secret \
                    must not reach a plugin, so take it out\n";
    assert_eq!((output.status.code(), stderr.as_str()), (Some(2), expected));
    assert!(!project.path("run").exists());
}

#[test]
fn only_what_a_trusted_key_has_signed_is_run() {
    let project = with_bundle();
    let key = project.querl(&["plugin", "sign", "--new-key", "key.pem"]).ok().stdout.trim_end().to_owned();
    let trust = format!("--set=plugins.trusted_keys=[\"{key}\"]");
    let message = project.refusal(&["config", "check", "querl.toml", &trust], 2);
    assert!(message.contains("tenant-fivedoctors") && message.contains(&key), "{message}");
    let message = project.refusal(&["config", "check", "querl.toml", "--set=plugins.trusted_keys=[\"ed25519:1\"]"], 2);
    assert!(message.starts_with("plugins.trusted_keys[0]: not a public key"), "{message}");
    project.querl(&["config", "check", "querl.toml", "--skip-plugins", &trust]).ok();
}

#[test]
fn configuration_check_looks_at_the_settings_of_plugins() {
    let project = with_bundle();
    let text = project.read("querl.toml") + "settings = { top1_share = 1.5 }\n";
    project.write("querl.toml", &text);
    let message = project.refusal(&["config", "check", "querl.toml"], 2);
    assert!(message.contains("`top1_share`") && message.contains("a number from 0 to 1, got 1.5"), "{message}");
    assert!(message.starts_with(&format!("querl.toml:{}: ", text.lines().count())), "{message}");
    assert!(!project.path("querl.lock").exists(), "a check pins nothing");
}

#[test]
fn bad_input_is_named() {
    let project = Project::new();
    project.write("not.querl", "not a bundle");
    std::fs::create_dir(project.path("empty")).unwrap();
    let reward = plugin("reward-competition");
    let cases: [(&[&str], &str); 13] = [
        (&["test", "nothing"], "plugin nothing: "),
        (&["test", "empty"], "plugin empty: the folder holds no "),
        (&["test", &reward, "--settings", "clip"], "--settings `clip`: expected KEY=VALUE"),
        (&["test", &reward, "--settings", "clipp=1"], "plugin reward-competition 0.2.0: setting `clipp`: "),
        (&["pack", "empty"], "empty/plugin.toml: "),
        (&["inspect", "not.querl"], "not.querl: "),
        (&["inspect", "nothing"], "nothing: there is no such file or folder"),
        (
            &["sign", "not.querl", "--key", "nothing.pem"],
            "nothing.pem: there is no such file; expected a private key, which `querl plugin sign --new-key FILE` makes",
        ),
        (&["pack", &reward, "--sign", "nothing.pem"], "nothing.pem: there is no such file; expected a private key"),
        (&["verify", "nothing"], "nothing: there is no such file; expected a `.querl` bundle"),
        (&["verify", "empty"], "empty: is a folder; expected a `.querl` bundle"),
        (&["push", "not.querl", "localhost:1/x"], "not.querl: "),
        (&["pull", "http://localhost:1/x"], "`http://localhost:1/x` begins with a protocol"),
    ];
    for (args, expected) in cases {
        let message = project.refusal(&[&["plugin"], args].concat(), 2);
        assert!(message.starts_with(expected), "{args:?}: {message}");
    }
    let unreachable = project.refusal(&["plugin", "pull", "127.0.0.1:1/x:0.2.0"], 2);
    assert!(unreachable.starts_with("127.0.0.1:1/x:0.2.0: cannot be reached"), "{unreachable}");
    project.querl(&["plugin", "sign", "--new-key", "key.pem"]).ok();
    let taken = project.refusal(&["plugin", "sign", "--new-key", "key.pem"], 2);
    assert!(taken.starts_with("key.pem: is there already"), "{taken}");
}
