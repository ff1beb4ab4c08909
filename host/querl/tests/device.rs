//! GPU features without a GPU: messages with a fake driver that only answers queries (`support/fake_driver`), and complete runs whose jobs
//! are executed by `libquerl_cuda` on the CPU.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use support::process::{interrupted, kill, signal};
use support::results::{assert_same, project, results, run_until, sft_results};
use support::{Project, with_sets};

/// The library without CUDA, which cargo builds with the other dependencies of the tests.
fn library() -> PathBuf {
    let deps = Path::new(env!("CARGO_BIN_EXE_querl")).parent().unwrap().join("deps");
    let path = deps.join("libquerl_cuda.so");
    assert!(path.is_file(), "{} is not there", path.display());
    path
}

/// The fake driver, compiled once per test run to a fixed path. It is renamed into place, because another test run may be using the
/// previous one.
static DRIVER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_driver");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/fake_driver/libcuda.rs");
    let (made, kept) = (folder.join(format!("libcuda-{}.so", std::process::id())), folder.join("libcuda.so.1"));
    std::fs::create_dir_all(&folder).unwrap();
    let mut rustc = Command::new("rustc");
    rustc.args(["--edition=2024", "--crate-type=cdylib", "--crate-name=cuda", "-o"]).arg(&made).arg(source);
    assert!(rustc.status().unwrap().success());
    std::fs::rename(&made, &kept).unwrap();
    kept
});

/// A command whose jobs are executed by the library, on the CPU.
fn across(project: &Project, args: &[&str]) -> Command {
    let mut command = project.command(args);
    command.env("QUERL_CUDA_ON_CPU", "1").env("QUERL_CUDA_LIBRARY", library());
    command
}

fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn args(sets: &[&'static str]) -> Vec<&'static str> {
    with_sets(&["run", "querl.toml", "--to", "eval"], sets)
}

/// With `off_by_one`, several threads of the library call the host; several samples and periodic checkpoints.
const SETS: [&str; 8] = [
    "sft.max_steps=6",
    "sft.save_steps=2",
    "sft.lora_dropout=0.1",
    "rl.max_steps=4",
    "rl.save_steps=2",
    "rl.eval_steps=2",
    "rl.n_samples=2",
    "rl.off_by_one=true",
];

fn records(project: &Project) -> String {
    let text = project.read("run/eval/records.jsonl");
    text.lines().map(support::results::timeless).collect()
}

#[test]
fn a_run_through_the_library_leaves_the_bytes_of_one_within_the_program() {
    let (within, across_it) = (project(), project());
    within.querl(&args(&SETS)).ok();
    let (code, _, said) = run(&mut across(&across_it, &args(&SETS)));
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("device: the CPU of libquerl_cuda\n"), "{said}");
    assert_same(&across_it, &results(&within));
    assert_eq!(records(&across_it), records(&within));
}

/// Two ranks on two named devices, both the CPU: in the library, and in the program.
#[test]
fn two_ranks_leave_the_same_bytes_on_both_sides_and_nearly_those_of_one() {
    let (one, within, across_it) = (project(), project(), project());
    one.querl(&args(&SETS)).ok();
    let two = |device: &'static str| args(&[&SETS[..], &[device]].concat());
    within.querl(&two("device=cpu:2")).ok();
    let (code, _, said) = run(&mut across(&across_it, &two("device=cuda:0,1")));
    assert_eq!(code, Some(0), "{said}");
    assert_same(&across_it, &results(&within));
    assert_eq!(records(&across_it), records(&within));
    // Two ranks that share a CPU have a higher latency.
    let has_latency = |project: &Project| {
        let of_model = |line: &str| line.contains("\"system\":\"sft\"");
        let text = project.read("run/eval/records.jsonl");
        let lines: Vec<&str> = text.lines().filter(|line| of_model(line)).collect();
        assert!(!lines.is_empty());
        lines.iter().map(|line| !line.contains("\"latency_ms\":null")).collect::<Vec<_>>()
    };
    assert!(has_latency(&one).iter().all(|has| *has) && has_latency(&within).iter().all(|has| !has));
    let (of_one, of_two) = (losses(&one), losses(&within));
    assert_eq!((of_one.len(), of_two.len()), (6, 6));
    // Dropout masks differ between ranks: losses are close, but not equal.
    assert!(of_one.iter().zip(&of_two).all(|(a, b)| (a - b).abs() < 0.05 * a.abs()), "{of_one:?}, {of_two:?}");
}

const LONG: [&str; 5] =
    ["sft.max_steps=30", "sft.epochs=30", "sft.save_steps=100", "rl.max_steps=9", "rl.save_steps=100"];

/// Interrupts `command` within the first steps of a stage.
fn interrupt(command: Command, project: &Project, stage: &str) {
    let child = run_until(command, project, stage, 3);
    signal(&child, "-TERM");
    let said = interrupted(child);
    assert!(said.contains(&format!("error: interrupted at {stage} step ")), "{said}");
}

#[test]
fn two_interrupted_ranks_resume_and_another_number_of_ranks_starts_over() {
    let (unbroken, stopped) = (project(), project());
    let args = args(&[&LONG[..], &["device=cpu:2"]].concat());
    unbroken.querl(&args).ok();
    for stage in ["sft", "rl"] {
        interrupt(stopped.command(&args), &stopped, stage);
    }
    let done = stopped.querl(&args).ok();
    assert!(done.stderr.contains("rl: resuming from step "), "{done:#?}");
    assert_same(&stopped, &results(&unbroken));
    let other = project();
    interrupt(other.command(&args), &other, "sft");
    let three = other.querl(&["sft", "querl.toml", "--set", "device=cpu:3", "--set", "sft.max_steps=30"]).ok();
    assert!(!three.stderr.contains("resuming from step"), "{three:#?}");
}

/// Started in the program or the library, stopped by a signal, which the library checks, and resumed in the other one.
#[test]
fn a_stop_reaches_the_library_and_either_side_resumes() {
    let (unbroken, stopped) = (project(), project());
    let args = args(&LONG);
    unbroken.querl(&args).ok();
    for stage in ["sft", "rl"] {
        interrupt(across(&stopped, &args), &stopped, stage);
    }
    let done = stopped.querl(&args).ok();
    assert!(done.stderr.contains("rl: resuming from step "), "{done:#?}");
    assert_same(&stopped, &results(&unbroken));
}

#[test]
fn an_error_of_the_environment_crosses_back_as_it_was() {
    let both = [project(), project()].map(|project| {
        project.edit(
            "kind = \"embedded\"",
            "kind = \"http\"\nbase_url = \"http://127.0.0.1:9\"\nmax_retries = 0\ntimeout_s = 2",
        );
        project.edit("score_threshold = 0.0\n", "");
        project
    });
    let args = ["rl", "querl.toml", "--from", "sft"];
    let within = both[0].querl(&args);
    let (code, _, said) = run(&mut across(&both[1], &args));
    let last = |text: &str| text.lines().last().unwrap().to_owned();
    assert!(last(&within.stderr).starts_with("error: "), "{within:#?}");
    assert_eq!((code, last(&said)), (within.code, last(&within.stderr)));
}

/// The error of `querl run` for a device, with these answers of the driver and this library.
fn refusal(device: &str, figures: &[(&str, &str)], library: &Path) -> String {
    let project = project();
    let mut command = project.command(&["run", "querl.toml", "--set", &format!("device={device}")]);
    command.env("QUERL_CUDA_DRIVER", &*DRIVER).env("QUERL_CUDA_LIBRARY", library).envs(figures.iter().copied());
    let (code, _, said) = run(&mut command);
    assert_eq!(code, Some(2), "{said}");
    let said = said.trim_end().strip_prefix("error: device is ").unwrap().to_owned();
    let said = said.replace(&library.display().to_string(), "LIBRARY");
    said.strip_suffix("; \"cpu\" and \"auto\" do without").unwrap_or(&said).to_owned()
}

/// Device, answers of the driver, library, error message.
type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a Path, &'a str);

#[test]
fn what_is_missing_for_a_gpu_is_one_sentence() {
    let ours = library();
    let why = |text: &str, device: &str| format!("\"{device}\", which cannot be used: {text}");
    let cases: [Case<'_>; 9] = [
        ("cuda:0", &[("FAKE_INIT", "999")], &ours, "the CUDA driver does not work: cuInit fails with CUDA error 999"),
        ("cuda:0", &[("FAKE_INIT", "100")], &ours, "the CUDA driver does not work: cuInit finds no device"),
        ("cuda:0", &[("FAKE_GPUS", "0")], &ours, "the CUDA driver sees no GPU"),
        (
            "cuda:0",
            &[("FAKE_CUDA", "11080")],
            &ours,
            "the CUDA driver supports CUDA 11.8; expected 12.0 or newer, so update it",
        ),
        ("cuda:2", &[], &ours, "the driver sees 2 GPU(s), cuda:0 to cuda:1, and none is cuda:2"),
        ("cuda:1-2", &[], &ours, "the driver sees 2 GPU(s), cuda:0 to cuda:1, and none is cuda:2"),
        ("cuda:0", &[], Path::new("nowhere.so"), "QUERL_CUDA_LIBRARY names LIBRARY; there is no file at that place"),
        ("cuda:0", &[], &DRIVER, "LIBRARY: it has no function `querl_cuda_abi`; it is not a library of querl"),
        ("cuda:1", &[], &ours, "libquerl_cuda was built without CUDA; build it with host/querl-gpu/build.sh"),
    ];
    for (device, figures, library, expected) in cases {
        assert_eq!(refusal(device, figures, library), why(expected, device));
    }
}

#[test]
fn auto_uses_the_cpu_and_reports_why() {
    let project = project();
    let mut command = project.command(&["run", "querl.toml", "--to", "sft", "--set", "device=auto"]);
    let (code, _, said) = run(&mut command);
    assert_eq!(code, Some(0), "{said}");
    let line = "device: the CPU, since there is no CUDA driver (libcuda.so.1) on this machine\n";
    assert_eq!(said.matches(line).count(), 1, "{said}");
}

#[test]
fn doctor_reports_gpus_memory_library_and_what_is_missing() {
    let project = project();
    let mut command = project.command(&["doctor"]);
    command.env("QUERL_CUDA_DRIVER", &*DRIVER).env("QUERL_CUDA_LIBRARY", library());
    let (code, text, said) = run(&mut command);
    assert_eq!(code, Some(0), "{said}");
    for line in [
        "ok  driver   the CUDA driver supports CUDA 13.0 and sees 2 GPU(s)\n",
        "ok  gpu      cuda:1 is Imagined 1, compute capability 9.0, 80.0 GiB of memory, 60.0 GiB of them free\n",
        " of querl 0.1.0, built without CUDA, so that the CPU is its only device\n",
        "  nccl     ",
        "libquerl_cuda was built without CUDA; build it with host/querl-gpu/build.sh: device = \"cuda:N\" is refused, and \
         device = \"auto\" takes the CPU\n",
    ] {
        assert!(text.contains(line), "{line}{text}");
    }
}

fn losses(project: &Project) -> Vec<f64> {
    let value = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64();
    project.read("run/metrics.jsonl").lines().filter_map(value).collect()
}

/// A command whose jobs are executed on GPUs by the library that the environment names.
fn on_gpus(project: &Project, args: &[&str], device: &str) -> Command {
    let library = std::env::var_os("QUERL_CUDA_LIBRARY").expect("QUERL_CUDA_LIBRARY names the library");
    let mut command = project.command(args);
    command.args(["--set", device]).env("QUERL_CUDA_LIBRARY", library).env("QUERL_CUDA_DRIVER", "libcuda.so.1");
    command
}

/// `QUERL_CUDA_LIBRARY=.../libquerl_cuda.so cargo test -p querl --test device -- --ignored`, with `libcuda.so.1` of NVIDIA or of the
/// simulator (tests/cuda). Activations are bf16 on a GPU: losses agree to a few thousandths.
#[test]
#[ignore = "needs a GPU or the simulated driver, and a library that was built with CUDA"]
fn a_gpu_fine_tunes_as_the_cpu_does_and_resumes() {
    let sets = ["--set", "model.dtype=bf16", "--set", "sft.max_steps=6", "--set", "sft.save_steps=2"];
    let args = [&["run", "querl.toml", "--to", "sft"], &sets[..]].concat();
    let on_gpu = |project: &Project| on_gpus(project, &args, "device=cuda:0");
    let [within, unbroken, broken] = [project(), project(), project()];
    within.querl(&args).ok();
    let (code, stdout, said) = run(&mut on_gpu(&unbroken));
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("sft: memory: takes about "), "{said}{stdout}");
    assert!(stdout.contains("  device         cuda:0, "), "{said}{stdout}");
    let (found, expected) = (losses(&unbroken), losses(&within));
    let close = |(found, expected): (&f64, &f64)| (found - expected).abs() < 0.01 * expected;
    assert!(found.len() == 6 && found.iter().zip(&expected).all(close), "{found:?}, expected {expected:?}");
    kill(run_until(on_gpu(&broken), &broken, "sft", 3));
    let (code, _, said) = run(&mut on_gpu(&broken));
    assert!(code == Some(0) && said.contains("sft: resuming from step "), "{said}");
    assert!(sft_results(&broken) == sft_results(&unbroken));
}

/// As the previous test, through all stages to the evaluation, killed during reinforcement learning.
#[test]
#[ignore = "needs a GPU or the simulated driver, and a library that was built with CUDA"]
fn a_gpu_runs_rl_and_resumes() {
    let sets = ["model.dtype=bf16", "sft.max_steps=4", "rl.max_steps=3", "rl.save_steps=1", "rl.n_samples=2"];
    let args = args(&sets);
    let on_gpu = |project: &Project| on_gpus(project, &args, "device=cuda:0");
    let [unbroken, broken] = [project(), project()];
    let (code, stdout, said) = run(&mut on_gpu(&unbroken));
    assert_eq!(code, Some(0), "{said}");
    let output = format!("{stdout}{said}");
    assert!(output.contains("rl: memory: takes about ") && output.matches("cuda:0, ").count() >= 2, "{output}");
    kill(run_until(on_gpu(&broken), &broken, "rl", 2));
    let (code, _, said) = run(&mut on_gpu(&broken));
    assert!(code == Some(0) && said.contains("rl: resuming from step "), "{said}");
    assert_same(&broken, &results(&unbroken));
    assert_eq!(records(&broken), records(&unbroken));
}

/// As the previous tests, with a model sharded over two GPUs, from fine-tuning to the evaluation.
#[test]
#[ignore = "needs two GPUs or the simulated driver with two, and a library that was built with CUDA"]
fn two_gpus_with_tensor_parallelism_train_and_generate() {
    let model: &str = format!("model.path={}", support::repository().join("examples/tiny-qwen3").display()).leak();
    let small = ["sft.max_steps=2", "rl.max_steps=1", "rl.n_samples=2", "rl.max_new_tokens=6"];
    let sets = [&["model.dtype=bf16", model], &small[..]].concat();
    let args = args(&sets);
    let [within, together] = [project(), project()];
    within.querl(&args).ok();
    let mut command = on_gpus(&together, &args, "device=cuda:0,1");
    let (code, stdout, said) = run(command.args(["--set", "model.tensor_parallel=2"]));
    assert_eq!(code, Some(0), "{said}");
    assert!(format!("{stdout}{said}").contains("cuda:0,1"), "{stdout}{said}");
    let (found, expected) = (losses(&together), losses(&within));
    let close = |(found, expected): (&f64, &f64)| (found - expected).abs() < 0.01 * expected;
    assert!(found.len() == 2 && found.iter().zip(&expected).all(close), "{found:?}, expected {expected:?}");
    let n_answers = |project: &Project| records(project).lines().count();
    assert_eq!(n_answers(&together), n_answers(&within));
}
