//! A training that was stopped in any way and resumed writes the same bytes as an uninterrupted one. Commands that save no state end at the
//! first signal.
//!
//! `QUERL_KILLS=100 cargo test --release -p querl --test kill -- --nocapture` sets the number of kills, `QUERL_KILL_SEED` the seed of their
//! times. The progress of a run at that time depends on the speed of the machine.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use querl_faulty::{Answer, FaultyServer, Reply};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use support::process::{self, kill, number};
use support::results::{assert_same, copy, project, results, run_until, sft_results};
use support::{Project, with_sets};

/// Settings whose state must survive a kill: checkpoints at odd steps, several samples, critics with and without an adapter, batches that
/// are generated one step ahead.
const PLAIN: [&str; 10] = [
    "sft.max_steps=13",
    "sft.epochs=9",
    "sft.gradient_accumulation_steps=2",
    "sft.lora_dropout=0.1",
    "sft.save_steps=3",
    "sft.eval_steps=4",
    "rl.max_steps=9",
    "rl.save_steps=2",
    "rl.eval_steps=3",
    "rl.n_samples=2",
];
const AHEAD: [&str; 4] = ["rl.off_by_one=true", "rl.critic=\"head\"", "rl.kl_target=0.1", "rl.normalize_rewards=true"];

fn args<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    with_sets(&["run", "querl.toml", "--to", "rl"], sets)
}

fn start(project: &Project, args: &[&str]) -> Child {
    project.command(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Random numbers below 1 from a seed: SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The stage in progress.
fn stage_of(project: &Project) -> &'static str {
    let ledger: Value = serde_json::from_str(&project.read("run/stages.json")).unwrap();
    let is_finished = |stage: &str| ledger["stages"][stage]["finished"] == true;
    match (is_finished("sft"), is_finished("rl")) {
        (false, _) => "sft",
        (true, false) => "rl",
        (true, true) => "after",
    }
}

/// After this number of kills a run may finish.
const KILLS_OF_A_RUN: usize = 5;

/// The results of an uninterrupted run with some settings, and the states from which killed runs start, with the duration from there.
struct Reference<'a> {
    args: Vec<&'a str>,
    results: BTreeMap<String, Vec<u8>>,
    /// The states before fine-tuning and before reinforcement learning, so that both stages are killed independently of their durations.
    starts: [(Project, Duration); 2],
}

impl<'a> Reference<'a> {
    fn new(sets: &[&'a str]) -> Self {
        let (before_sft, before_rl, whole) = (project(), project(), project());
        let args = args(sets);
        let sft_only: Vec<&str> = args.iter().map(|arg| if *arg == "rl" { "sft" } else { arg }).collect();
        let started = Instant::now();
        whole.querl(&sft_only).ok();
        copy(&whole.path("run"), &before_rl.path("run"));
        let between = Instant::now();
        whole.querl(&args).ok();
        let starts = [(before_sft, started.elapsed()), (before_rl, between.elapsed())];
        Self { args, results: results(&whole), starts }
    }
}

#[test]
fn a_training_that_is_killed_at_any_moment_ends_as_one_that_was_never_killed() {
    let (n_kills, seed) = (number("QUERL_KILLS", 6) as usize, number("QUERL_KILL_SEED", 1));
    let mut random = Random(seed);
    let references = [Reference::new(&PLAIN), Reference::new(&[&PLAIN[..], &AHEAD[..]].concat())];
    let mut killed: BTreeMap<&str, usize> = BTreeMap::new();
    let mut n_runs = 0;
    while killed.values().sum::<usize>() < n_kills {
        let reference = &references[n_runs % 2];
        let (start_from, whole) = &reference.starts[n_runs / 2 % 2];
        let project = project();
        copy(&start_from.path("run"), &project.path("run"));
        for n_before in 0.. {
            let is_enough = n_before >= KILLS_OF_A_RUN || killed.values().sum::<usize>() >= n_kills;
            let limit = if is_enough { Duration::from_secs(600) } else { whole.mul_f64(1.1 * random.next()) };
            let mut child = start(&project, &reference.args);
            if process::ends_within(&mut child, limit) {
                break;
            }
            *killed.entry(stage_of(&project)).or_default() += 1;
        }
        assert_same(&project, &reference.results);
        n_runs += 1;
    }
    println!("{n_runs} runs, killed {killed:?}, seed {seed}");
    if n_kills >= 50 {
        assert!(killed.contains_key("sft") && killed.contains_key("rl"), "no kill in one of the stages");
    }
}

/// A kill during judge requests for rollouts: completed judgements are not requested again, and policy and episodes are those of an
/// uninterrupted run.
#[test]
fn a_training_killed_while_scores_are_awaited_pays_for_no_judgement_twice() {
    let server = FaultyServer::start(|_| {
        let message = json!({"content": "{\"综合得分\": 4.0, \"理由\": \"好\"}"});
        let answer = Answer::json(200, &json!({"choices": [{"message": message, "finish_reason": "stop"}]}));
        Reply::After(Duration::from_millis(100), Box::new(answer.into()))
    });
    let judged = || {
        let project = project();
        let judge = format!(
            "kind = \"openai\"\nbase_url = \"{}/v1\"\nmodel = \"j\"\napi_key_env = \"\"\nmax_concurrent = 1",
            server.url()
        );
        project.edit("kind = \"rubric\"", &judge);
        project.edit("sample_rate = 0.5", "sample_rate = 1.0");
        project.edit("[model]", "[cache]\npath = \"answers.redb\"\n[model]");
        project
    };
    let left = |project: &Project| {
        let mut found = results(project);
        // It counts the calls made and the calls answered by the cache.
        found.remove("metrics.jsonl");
        found
    };
    let (whole, killed, args) = (judged(), judged(), args(&[]));
    whole.querl(&args).ok();
    let n_whole = server.n_requests();
    assert!(n_whole >= 8, "{n_whole} judgements");
    for share in 1..=3 {
        let mut child = start(&killed, &args);
        while server.n_requests() < n_whole + n_whole * share / 4 {
            assert!(child.try_wait().unwrap().is_none(), "ended before the kill");
            std::thread::sleep(Duration::from_millis(2));
        }
        // By now the response before this request is on disk, and the response to this one has not been sent.
        std::thread::sleep(Duration::from_millis(60));
        kill(child);
    }
    killed.querl(&args).ok();
    let asked: Vec<String> =
        server.requests().split_off(n_whole).iter().map(|asked| asked.json().to_string()).collect();
    let n_twice = asked.len() - asked.iter().collect::<BTreeSet<_>>().len();
    // At each kill one request is in progress, and one response may not be on disk yet on a slow machine.
    assert!(n_twice <= 2 * 3, "{n_twice} of {} requests were sent twice", asked.len());
    assert!(left(&killed) == left(&whole), "policy or episodes differ from those of a run that was never killed");
}

const LONG: [&str; 4] = ["sft.max_steps=40", "sft.epochs=40", "sft.save_steps=100", "sft.eval_steps=20"];

fn sft_args<'a>(more: &[&'a str]) -> Vec<&'a str> {
    with_sets(&["run", "querl.toml", "--to", "sft"], &[&LONG, more].concat())
}

/// Regression: the second SIGHUP of a closed terminal ended the training at once, without saving its state.
#[test]
fn an_interrupted_stage_resumes_and_starts_over_on_other_inputs() {
    // Tests that were started with `nohup` inherit an ignored SIGHUP, and so would their children.
    // SAFETY: it sets the default action.
    unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) };
    let (unbroken, stopped) = (project(), project());
    let args = sft_args(&[]);
    unbroken.querl(&args).ok();
    let interrupt = |n_lines, signals: &[&str]| {
        let child = run_until(stopped.command(&args), &stopped, "sft", n_lines);
        for signal in signals {
            process::signal(&child, signal);
        }
        let said = process::interrupted(child);
        assert!(said.contains("the state is saved; run the same command again to resume"), "{said}");
        said
    };
    interrupt(2, &["-INT"]);
    // Not near a multiple of `save_steps`: the state was saved by the interrupt.
    assert!(interrupt(6, &["-HUP", "-HUP", "-HUP"]).contains("sft: resuming from step "));
    let newest = std::fs::read_dir(stopped.path("run/sft/state")).unwrap().count();
    assert!(newest >= 1);

    let half = project();
    copy(&stopped.path("run"), &half.path("run"));
    let changed = half.querl(&sft_args(&["sft.learning_rate=2e-3"])).ok();
    assert!(changed.stderr.contains("sft: running (sft.learning_rate changed)\n"), "{changed:#?}");
    assert!(!changed.stderr.contains("resuming"), "{changed:#?}");

    let done = stopped.querl(&args).ok();
    assert!(done.stderr.contains("sft: running (stopped on the way last time)\n"), "{done:#?}");
    assert!(done.stderr.contains("sft: resuming from step "), "{done:#?}");
    assert!(sft_results(&stopped) == sft_results(&unbroken));
    assert!(sft_results(&half) != sft_results(&unbroken));
}

/// Regression: the first signal waited for the end of a part of the rollouts, which takes minutes with long responses.
#[test]
fn a_signal_stops_a_rollout_within_a_decode_step_and_saves_the_state() {
    let project = project();
    project.querl(&["run", "querl.toml", "--to", "sft"]).ok();
    let sets = [
        "rl.batch_size=64",
        "rl.n_samples=32",
        "rl.pipeline_parts=1",
        "rl.max_new_tokens=1000",
        "rl.min_new_tokens=1000",
    ];
    let args = with_sets(&["rl", "querl.toml"], &sets);
    // The first line is the evaluation before the first step. All 2 million tokens of that step are in one part.
    let child = run_until(project.command(&args), &project, "rl", 1);
    std::thread::sleep(Duration::from_secs(1));
    let said = ended_by(child, "-INT");
    assert!(said.contains("the state is saved; run the same command again to resume"), "{said}");
    assert!(std::fs::read_dir(project.path("run/rl/state")).unwrap().next().is_some());
}

/// Symptom: a rollout that was interrupted before its end made no progress. This test compares its bytes through the command line.
#[test]
fn a_rollout_that_is_interrupted_again_and_again_ends_with_the_bytes_of_one_that_never_was() {
    let (unbroken, stopped) = (project(), project());
    unbroken.querl(&["run", "querl.toml", "--to", "sft"]).ok();
    copy(&unbroken.path("run"), &stopped.path("run"));
    let sets = ["rl.max_steps=2", "rl.batch_size=8", "rl.n_samples=8", "rl.eval_steps=100"];
    let lengths = ["rl.min_new_tokens=300", "rl.max_new_tokens=300"];
    let args = with_sets(&["rl", "querl.toml"], &[&sets[..], &lengths].concat());
    unbroken.querl(&args).ok();
    let n_interrupts = number("QUERL_KILLS", 8);
    let mut within_a_rollout = 0;
    for n in 0..n_interrupts {
        let mut child = stopped.command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        if n == 0 {
            // The evaluation before the first step.
            while !stopped.read("run/metrics.jsonl").contains("\"stage\":\"rl\"") {
                std::thread::sleep(Duration::from_millis(2));
            }
        } else {
            assert!(lines.any(|line| line.starts_with("rl: resuming from step ")), "it does not resume");
        }
        std::thread::sleep(Duration::from_millis(60));
        process::signal(&child, "-INT");
        match child.wait().unwrap().code() {
            Some(130) => within_a_rollout += 1,
            code => {
                assert_eq!(code, Some(0), "{:?}", lines.collect::<Vec<_>>());
                break;
            }
        }
    }
    println!("{within_a_rollout} of {n_interrupts} interrupts");
    assert!(within_a_rollout >= n_interrupts.min(2), "the rollouts are too short");
    stopped.querl(&args).ok();
    assert_same(&stopped, &results(&unbroken));
}

/// The step of the newest checkpoint of a stage.
fn newest_state(project: &Project, stage: &str) -> u64 {
    let entries = std::fs::read_dir(project.path(&format!("run/{stage}/state"))).unwrap().flatten();
    let step = |entry: std::fs::DirEntry| {
        entry.file_name().to_str()?.strip_prefix("step-")?.strip_suffix(".state")?.parse::<u64>().ok()
    };
    entries.filter_map(step).max().unwrap()
}

#[test]
fn a_damaged_checkpoint_falls_back_to_the_one_before() {
    let (unbroken, damaged) = (project(), project());
    let args = sft_args(&["sft.save_steps=3"]);
    unbroken.querl(&args).ok();
    kill(run_until(damaged.command(&args), &damaged, "sft", 9));
    let newest = newest_state(&damaged, "sft");
    let path = damaged.path(&format!("run/sft/state/step-{newest}.state"));
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let done = damaged.querl(&args).ok();
    let before = newest - 3;
    let warning = format!(
        "step-{newest}.state: is damaged: its digest is not that of its content; the checkpoint of step {before} is used\n"
    );
    assert!(done.stderr.contains(&warning), "{done:#?}");
    assert!(done.stderr.contains(&format!("sft: resuming from step {before}\n")), "{done:#?}");
    assert!(sft_results(&damaged) == sft_results(&unbroken));
}

/// Regression: a run resumed from an episode log whose content was damaged, and recorded the log's digest as that of a sound one.
#[test]
fn a_damaged_episode_log_falls_back_to_a_checkpoint_that_fits_or_stops_the_run() {
    let (unbroken, damaged) = (project(), project());
    let args = args(&["rl.max_steps=20", "rl.save_steps=1", "rl.eval_steps=100"]);
    unbroken.querl(&args).ok();
    // The evaluation before the first step, and three steps.
    kill(run_until(damaged.command(&args), &damaged, "rl", 4));
    let log = damaged.path("run/episodes.jsonl");
    let whole = std::fs::read(&log).unwrap();
    let damage = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] = 0xff;
        std::fs::write(&log, bytes).unwrap();
    };
    damage(0);
    let stopped = damaged.querl(&args);
    let expected = "bytes were changed after the checkpoint was written; no earlier checkpoint fits it; run the stage again with `--from rl`\n";
    assert_eq!(stopped.code, Some(2), "{stopped:#?}");
    assert!(stopped.stderr.ends_with(expected), "{stopped:#?}");

    let newest = newest_state(&damaged, "rl");
    let id = format!("step-{newest:06}/");
    damage(whole.windows(id.len()).position(|bytes| bytes == id.as_bytes()).unwrap());
    let done = damaged.querl(&args).ok();
    let before = newest - 1;
    let warning =
        format!("bytes were changed after the checkpoint was written; the checkpoint of step {before} is used\n");
    assert!(done.stderr.contains(&warning), "{done:#?}");
    assert!(done.stderr.contains(&format!("rl: resuming from step {before}\n")), "{done:#?}");
    assert_same(&damaged, &results(&unbroken));
}

/// A limit on file size simulates a full disk: the write fails half way.
#[test]
fn a_full_disk_is_a_clean_stop_that_can_be_resumed() {
    let (unbroken, full) = (project(), project());
    let args = sft_args(&["sft.save_steps=4", "sft.eval_steps=100"]);
    unbroken.querl(&args).ok();
    kill(run_until(full.command(&args), &full, "sft", 5));
    let state = std::fs::read_dir(full.path("run/sft/state")).unwrap().flatten().next().unwrap();
    let n_blocks = state.metadata().unwrap().len() / 1024 / 2;
    // With SIGXFSZ ignored, the write itself fails.
    let limited = full.querl_after(&format!("trap '' XFSZ; ulimit -f {n_blocks}"), &args);
    let said = limited.stderr;
    assert_eq!(limited.code, Some(1), "{said}");
    let message = "step-8.state: cannot be written; earlier checkpoints are complete; run the same command again to \
                   resume: a file reaches the limit on its size; raise the limit (`ulimit -f`): File too large (os error \
                   27)\n";
    assert!(said.ends_with(message), "{said}");
    let done = full.querl(&args).ok();
    assert!(done.stderr.contains("sft: resuming from step 4\n"), "{done:#?}");
    assert!(sft_results(&full) == sft_results(&unbroken));
}

/// More than a busy machine needs; most commands end within a tenth of a second.
const AT_ONCE: Duration = Duration::from_secs(20);

/// Sends one signal and waits for exit code 130. Returns the following text on stderr.
fn ended_by(mut child: Child, signal: &str) -> String {
    process::signal(&child, signal);
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < AT_ONCE, "one {signal} does not end it");
        std::thread::sleep(Duration::from_millis(5));
    }
    process::interrupted(child)
}

const INTERRUPTED: &str = "error: interrupted; finished stages and checkpoints are kept, run the same command again\n";

/// Also false for a zombie process.
#[cfg(target_os = "linux")]
fn is_running(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

/// Regression: a build continued after the first Ctrl-C, and build scripts continued after the end of querl.
#[cfg(target_os = "linux")]
#[test]
fn a_plugin_build_ends_with_all_its_processes_at_the_first_signal() {
    let project = Project::new();
    std::fs::create_dir_all(project.path("slow/src")).unwrap();
    let manifest = "[package]\nname = \"slow\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[lib]\ncrate-type = [\"cdylib\"]\n[workspace]\n";
    project.write("slow/Cargo.toml", manifest);
    project.write("slow/src/lib.rs", "");
    let script = "fn main() {\n    std::fs::write(\"pid\", std::process::id().to_string()).unwrap();\n    \
                  std::thread::sleep(std::time::Duration::from_secs(600));\n}\n";
    project.write("slow/build.rs", script);
    let mut command = project.command(&["plugin", "build", "slow"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    let build_script = loop {
        let written = std::fs::read_to_string(project.path("slow/pid")).unwrap_or_default();
        if let Ok(pid) = written.parse::<u32>() {
            break pid;
        }
        assert!(child.try_wait().unwrap().is_none() && started.elapsed().as_secs() < 300, "no build script runs");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(is_running(build_script));
    let said = ended_by(child, "-TERM");
    // Symptom: the message mentioned finished stages, which a plugin command does not have.
    assert!(said.ends_with("error: interrupted\n"), "{said}");
    let started = Instant::now();
    while is_running(build_script) {
        assert!(started.elapsed() < AT_ONCE, "the build script continues");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// All queries of the example, and a model with a slow chat template: encoding takes seconds.
fn many_rows() -> Project {
    let project = Project::new();
    let rows = support::repository().join("examples/fivedoctors/teacher_rewrites.jsonl");
    for file in ["queries.jsonl", "teacher.jsonl"] {
        std::fs::copy(&rows, project.path(file)).unwrap();
    }
    project.copy_model("model");
    let mut settings: Value = serde_json::from_str(&project.read("model/tokenizer_config.json")).unwrap();
    let template =
        format!("{{% for i in range(20000) %}}{{% endfor %}}{}", settings["chat_template"].as_str().unwrap());
    settings["chat_template"] = template.into();
    project.write("model/tokenizer_config.json", &settings.to_string());
    project.edit("split = [0.6, 0.2, 0.2]", "split = [0.4, 0.1, 0.5]\non_leak = \"warn\"");
    let model = project.read("querl.toml").lines().find(|line| line.contains("random-qwen3")).unwrap().to_owned();
    project.edit(&model, &format!("path = \"{}\"", project.path("model").display()));
    project
}

/// Regression: a second Ctrl-C was needed while chat templates were rendered, intervals computed or plugins tested.
#[test]
fn work_that_saves_nothing_ends_at_the_first_signal_and_the_earlier_result_is_put_back() {
    let project = many_rows();
    let until_sft = ["run", "querl.toml", "--to", "sft"];
    project.querl(&until_sft).ok();
    let adapter = std::fs::read(project.path("run/sft/best/adapter_model.safetensors")).unwrap();

    // Rendering chat templates.
    let mut command = project.command(&[&until_sft[..], &["--set", "sft.learning_rate=2e-3"]].concat());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.starts_with("sft: running (")), "sft runs again");
    ended_by(child, "-INT");
    let said: Vec<String> = lines.collect();
    assert_eq!(said.last().map(String::as_str), Some(INTERRUPTED.trim_end()), "{said:?}");
    let again = project.querl(&until_sft).ok();
    assert!(again.stderr.contains("sft: what was there before is back in place\n"), "{again:#?}");
    assert!(again.stderr.contains("sft: finished earlier, skipped\n"), "{again:#?}");
    assert!(std::fs::read(project.path("run/sft/best/adapter_model.safetensors")).unwrap() == adapter);

    // Computing bootstrap intervals of the report.
    let systems = ["eval", "querl.toml", "--set", "eval.systems=[\"raw\", \"teacher\"]"];
    project.querl(&systems).ok();
    let resolved = project.read("run/config.resolved.toml");
    project.write("run/config.resolved.toml", &resolved.replace("bootstrap = 50\n", "bootstrap = 1000000\n"));
    let reward = support::repository().join("plugins/reward-competition");
    let many_calls = ["plugin", "test", reward.to_str().unwrap(), "--repeats", "1000000"];
    for (args, expected) in [(&["report", "run"][..], INTERRUPTED), (&many_calls[..], "error: interrupted\n")] {
        let child = project.command(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        // By now it has started, also on a busy machine; it would take many times as long.
        std::thread::sleep(Duration::from_secs(4));
        let said = ended_by(child, "-INT");
        assert!(said.ends_with(expected), "{args:?}: {said}");
    }
}
