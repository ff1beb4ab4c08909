//! The loader of components: the bytes of a `.wasm` file are rejected, or become a plugin with name and version.
#![no_main]

use libfuzzer_sys::fuzz_target;
use querl_core::config::PluginLimits;
use querl_plugin::{HostOptions, PluginHost};
use std::cell::RefCell;

/// A host caches what it has loaded; it is replaced from time to time to limit memory.
const LOADS_PER_HOST: u32 = 200;

struct Bench {
    host: PluginHost,
    folder: tempfile::TempDir,
    n_loads: u32,
}

thread_local! {
    static BENCH: RefCell<Option<Bench>> = const { RefCell::new(None) };
}

fn bench() -> Bench {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let limits =
        PluginLimits { fuel_per_item: 1_000_000, timeout_ms: 1_000, memory_bytes: 16 << 20, ..Default::default() };
    let cache_dir = Some(folder.path().join("cache"));
    let host = PluginHost::new(HostOptions { limits, cache_dir, n_slots: 1, ..HostOptions::default() });
    Bench { host: host.expect("the host starts"), folder, n_loads: 0 }
}

fuzz_target!(|bytes: &[u8]| {
    BENCH.with_borrow_mut(|slot| {
        if slot.as_ref().is_some_and(|bench| bench.n_loads == LOADS_PER_HOST) {
            *slot = None;
        }
        let bench = slot.get_or_insert_with(bench);
        bench.n_loads += 1;
        let path = bench.folder.path().join("guest.wasm");
        std::fs::write(&path, bytes).expect("the folder takes a file");
        match bench.host.load(&path) {
            Ok(plugin) => assert!(!plugin.id().is_empty() && !plugin.kinds().is_empty()),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    });
});
