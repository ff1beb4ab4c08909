//! Files that are not plugins, and components for contracts that this host does not support.

use crate::common::{assert_others_are_served, episode, guest, host, refusal, wat};
use querl_core::config::PluginLimits;
use querl_plugin::{Compiler, HostOptions, PluginHost};
use std::path::Path;
use std::time::{Duration, Instant};
use wasmtime::component::Component;
use wasmtime::{Config, Engine};

/// The error for a file with these bytes; the host can load a valid one afterwards.
fn refusal_of(bytes: &[u8]) -> String {
    let host = host();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.wasm");
    std::fs::write(&path, bytes).unwrap();
    let message = host.load(&path).unwrap_err().to_string();
    assert!(message.starts_with(&format!("plugin {}: ", path.display())), "{message}");
    assert!(!message.contains('\n'), "{message}");
    assert_others_are_served(&host);
    message
}

#[test]
fn core_module_is_distinguished_from_a_component() {
    let module = ::wat::parse_str("(module (func (export \"score\")))").unwrap();
    let message = refusal_of(&module);
    let expected = "it is a core module; expected a component, as the target wasm32-wasip2 makes";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn truncated_component_is_refused_wherever_it_ends() {
    let whole = wat::component("ordinary");
    let host = host();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.wasm");
    for n_bytes in (0..whole.len()).step_by(whole.len() / 40).chain([whole.len() - 1]) {
        std::fs::write(&path, &whole[..n_bytes]).unwrap();
        let message = host.load(&path).unwrap_err().to_string();
        let refused = ["it is not WebAssembly", "it does not compile", "it exports none of", "it does not export"];
        assert!(refused.iter().any(|reason| message.contains(reason)), "{n_bytes} of {}: {message}", whole.len());
    }
    std::fs::write(&path, &whole).unwrap();
    host.load(&path).unwrap();
}

#[test]
fn native_code_is_refused_under_any_header() {
    let engine = Engine::new(&Config::new()).unwrap();
    let compiled = engine.precompile_component(&wat::component("ordinary")).unwrap();
    assert!(refusal_of(&compiled).ends_with("it is native code; expected a component"));
    let posing = [b"\0asm\x0d\0\x01\0", &*compiled].concat();
    assert!(refusal_of(&posing).contains("it does not compile: "));
    let posing = [b"\0asm\x0d\0\x01\0", &compiled[8..]].concat();
    assert!(refusal_of(&posing).contains("it does not compile: "));
}

#[test]
fn file_of_the_compiled_cache_is_no_plugin() {
    let folder = tempfile::tempdir().unwrap();
    let host = crate::common::host_in(folder.path());
    guest(&host, "ordinary");
    let kept = std::fs::read_dir(folder.path().join("compiled")).unwrap().next().unwrap().unwrap().path();
    let message = host.load(&kept).unwrap_err().to_string();
    assert!(message.ends_with("it is native code; expected a component"), "{message}");
}

#[test]
fn newer_minor_loads_where_it_calls_only_what_is_known() {
    let host = host();
    let plugin = guest(&host, "newer-minor");
    assert_eq!(plugin.score_batch(&[episode("a", "x")]).unwrap()[0].as_ref().unwrap().total, 0.5);
}

#[test]
fn newer_minor_that_calls_what_is_not_known_is_refused_with_the_name() {
    let message = refusal("newer-minor-function");
    let advice =
        "which this host, of contract 0.1.0, does not offer; use a newer querl, or build the plugin for contract 0.1.0";
    assert!(message.ends_with(&format!("it calls `flush` of `querl:plugin/log@0.1.7`, {advice}")), "{message}");
    let message = refusal("newer-minor-interface");
    assert!(message.ends_with(&format!("it calls `count` of `querl:plugin/tokens@0.1.7`, {advice}")), "{message}");
}

#[test]
fn what_does_not_fit_this_host_is_refused_with_its_name() {
    for (name, end) in [
        ("contract-0-3", "it was built for version 0.3.0 of the plugin contract; this host runs 0.1.x and 0.2.x"),
        ("missing-info", "it does not export `info` of `querl:plugin`, which every plugin does"),
        (
            "missing-kind",
            "it exports none of `prompts`, `filters`, `rewards`, `group-rewards` and `style-scores` of `querl:plugin`",
        ),
        ("missing-range", "`querl:plugin/rewards@0.1.0` does not have export `range`"),
        ("unknown-import", "it imports `surprise`, which this host does not offer"),
        ("too-many-memories", "defined memories count of 3 exceeds the per-instance limit of 1"),
        ("huge-table", "table index 0 has a minimum element size of 100000000 which exceeds the limit of 100000"),
    ] {
        let message = refusal(name);
        assert!(message.ends_with(end) && !message.contains('\n'), "{name}: {message}");
    }
    let message = refusal("other-range");
    let expected = "its `rewards` is not of the contract's types: expected `record` found `f64`";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn more_memory_than_the_limit_from_the_start_is_refused() {
    let message = refusal("huge-memory");
    let limit = PluginLimits::default().memory_bytes;
    let cause = format!("memory has a minimum byte size of 4294967296 which exceeds the limit of {limit:#x} bytes");
    assert!(message.contains("such as `plugins.limits.memory_bytes`: ") && message.ends_with(&cause), "{message}");
}

/// Nested blocks with a jump from each to all enclosing ones: 200 KB that take Cranelift more than half a minute.
fn slow_to_compile() -> Vec<u8> {
    const DEPTH: usize = 500;
    let jump = |depth: usize| {
        let targets: String = (0..depth).map(|target| format!(" {target}")).collect();
        format!("(br_table{targets} (i32.wrap_i64 (local.get 0))) end\n")
    };
    let jumps: String = (1..=DEPTH).rev().map(jump).collect();
    let body = format!("{}{jumps} local.get 0", "block\n".repeat(DEPTH));
    ::wat::parse_str(format!("(component (core module (func (param i64) (result i64) {body})))")).unwrap()
}

#[test]
fn component_that_takes_very_long_to_compile_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("slow.wasm");
    std::fs::write(&path, slow_to_compile()).unwrap();
    let host = PluginHost::new(HostOptions {
        limits: PluginLimits { compile_timeout_ms: 1000, ..PluginLimits::default() },
        compiler: Compiler::Child(env!("CARGO_BIN_EXE_querl-compile-plugin").into(), Vec::new()),
        cache_dir: Some(folder.path().to_owned()),
        ..HostOptions::default()
    })
    .unwrap();
    let start = Instant::now();
    let message = host.load(&path).unwrap_err().to_string();
    assert!(
        message.contains(
            "slow.wasm: compiling it took longer than 1000 ms (`plugins.limits.compile_timeout_ms`); raise it"
        ),
        "{message}"
    );
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(std::fs::read_dir(folder.path().join("compiled")).unwrap().count(), 0, "nothing is left of it");
}

#[test]
fn component_for_another_purpose_is_refused() {
    let text = r#"(component
        (core module $m (func (export "f")))
        (core instance $i (instantiate $m))
        (func (export "run") (canon lift (core func $i "f"))))"#;
    let bytes = ::wat::parse_str(text).unwrap();
    Component::new(&Engine::new(&Config::new()).unwrap(), &bytes).unwrap();
    assert!(refusal_of(&bytes).contains("it exports none of `prompts`"));
}

#[test]
fn missing_file_is_named() {
    let message = host().load(Path::new("no/such/plugin.wasm")).unwrap_err().to_string();
    assert!(message.starts_with("plugin no/such/plugin.wasm: cannot be read: No such file"), "{message}");
    let expected = "expected a `.querl` bundle, a `.wasm` component or a folder with its source";
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn proposals_that_are_not_accepted_are_refused_whatever_wasmtime_knows() {
    for module in [
        "(func (return_call 0))",
        "(memory i64 1)",
        "(memory 1 1 shared)",
        "(tag) (func (throw 0))",
        "(type (struct)) (func (drop (struct.new 0)))",
        "(func (param i64 i64) (drop (drop (i64.add128 (local.get 0) (local.get 1) (local.get 0) (local.get 1)))))",
    ] {
        let bytes = ::wat::parse_str(format!("(component (core module {module}))"))
            .unwrap_or_else(|error| panic!("{module}: {error}"));
        let message = refusal_of(&bytes);
        assert!(message.contains("it does not compile: "), "{module}: {message}");
    }
}
