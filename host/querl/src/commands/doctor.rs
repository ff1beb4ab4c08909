//! `querl doctor`: devices, toolchain and caches of this machine.

use super::plugin::doctor::{WASM_TARGET, first_line, has_wasm_target};
use crate::args::Format;
use clap::Args;
use querl_core::config::PluginLimits;
use querl_pipeline::device::{
    self, DeviceUnavailable, Driver, Gpu, OpenedLibrary, Probe, capability_name, check_fit, version_name,
};
use querl_pipeline::plugins::open_host;
use querl_plugin::{MemoryReservation, SourceFolders};
use querl_train::job::interface::Description;
use serde::Serialize;

#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Serialize)]
struct Finding {
    name: &'static str,
    /// False if a feature of querl cannot be used on this machine.
    ok: bool,
    sentence: String,
}

pub fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let findings: Vec<Finding> =
        [version(), cores()].into_iter().chain(gpu_findings()).chain([cargo(), wasm_target(), plugin_host()]).collect();
    let line =
        |Finding { name, ok, sentence }: &Finding| format!("{}  {name:<8} {sentence}\n", if *ok { "ok" } else { "--" });
    args.format.print(&findings, || findings.iter().map(line).collect())
}

fn version() -> Finding {
    let sentence =
        format!("querl {} on {} {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH);
    Finding { name: "querl", ok: true, sentence }
}

fn cores() -> Finding {
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let sentence = format!("{n_cores} core(s); `--threads` or `threads` in the configuration uses fewer");
    Finding { name: "cpu", ok: true, sentence }
}

fn cargo() -> Finding {
    match first_line("cargo", &["--version"]) {
        Some(version) => finding("cargo", true, format!("{version} builds plugins from source")),
        None => {
            let missing = "cargo is not installed: plugins given as source folders cannot be built, .wasm files work";
            finding("cargo", false, missing.into())
        }
    }
}

fn wasm_target() -> Finding {
    let ok = has_wasm_target();
    let sentence = match ok {
        true => format!("the target {WASM_TARGET} is installed"),
        false => format!("the target {WASM_TARGET} is missing; `rustup target add {WASM_TARGET}` installs it"),
    };
    Finding { name: "wasm", ok, sentence }
}

fn plugin_host() -> Finding {
    let (ok, sentence) = match open_host(&PluginLimits::default(), &[], SourceFolders::Refuse) {
        Ok(host) if host.memory_reservation() == MemoryReservation::OnDemand => (true, "the plugin host starts without its pool of memory, since the \
            address space of this process is limited (`ulimit -v`): calls of plugins are slower, results are the same".into()),
        Ok(_) => (true, "the plugin host starts; compiled plugins are kept in $QUERL_CACHE_DIR, else $XDG_CACHE_HOME/querl, else ~/.cache/querl".into()),
        Err(error) => (false, error.to_string()),
    };
    Finding { name: "plugins", ok, sentence }
}

/// Findings in this order: driver, each GPU, GPU library, NCCL if there are several GPUs, conclusion.
fn gpu_findings() -> Vec<Finding> {
    let driver = Probe::open().driver();
    let library = device::open_library();
    let mut findings = vec![of_driver(driver.as_ref())];
    findings.extend(driver.iter().flat_map(|driver| (0..driver.gpus.len()).map(|index| of_gpu(driver, index))));
    findings.push(of_library(library.as_ref()));
    findings.extend(driver.iter().filter(|driver| driver.gpus.len() > 1).map(|_| of_nccl(device::nccl())));
    findings.push(conclusion(driver.as_ref(), library.as_ref()));
    findings
}

fn of_driver(driver: Result<&Driver, &DeviceUnavailable>) -> Finding {
    match driver {
        Ok(driver) => {
            let (version, n_gpus) = (version_name(driver.cuda), driver.gpus.len());
            finding("driver", true, format!("the CUDA driver supports CUDA {version} and sees {n_gpus} GPU(s)"))
        }
        Err(missing) => finding("driver", false, missing.to_string()),
    }
}

fn of_gpu(driver: &Driver, index: usize) -> Finding {
    let Gpu { name, memory_bytes, capability } = &driver.gpus[index];
    let free = match driver.free_bytes(index) {
        Ok(free) => format!("{:.1} GiB of them free", gibibytes(free)),
        Err(error) => format!("how many are free is not known: {error}"),
    };
    let total = gibibytes(*memory_bytes);
    let capability = capability_name(*capability);
    let sentence = format!("cuda:{index} is {name}, compute capability {capability}, {total:.1} GiB of memory, {free}");
    finding("gpu", true, sentence)
}

fn gibibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn of_library(library: Result<&OpenedLibrary, &DeviceUnavailable>) -> Finding {
    let OpenedLibrary { library, path } = match library {
        Ok(found) => found,
        Err(missing) => return finding("library", false, missing.to_string()),
    };
    let Description { version, cuda, capabilities, .. } = library.description();
    let built = match cuda {
        Some(cuda) => {
            let names: Vec<String> = capabilities.iter().map(|capability| capability_name(*capability)).collect();
            format!("built with CUDA {} for compute capabilities {}", version_name(*cuda), names.join(", "))
        }
        None => "built without CUDA, so that the CPU is its only device".into(),
    };
    finding("library", cuda.is_some(), format!("{} is of querl {version}, {built}", path.display()))
}

fn of_nccl(version: Result<String, DeviceUnavailable>) -> Finding {
    match version {
        Ok(version) => {
            let sentence = format!("NCCL {version} is found: device = \"cuda:0,1\" shares the work of two GPUs");
            finding("nccl", true, sentence)
        }
        Err(missing) => finding("nccl", false, format!("several GPUs cannot share work: {missing}")),
    }
}

fn conclusion(
    driver: Result<&Driver, &DeviceUnavailable>,
    library: Result<&OpenedLibrary, &DeviceUnavailable>,
) -> Finding {
    let usable = match (driver, library) {
        (Ok(driver), Ok(found)) => usable(driver, found),
        (Err(_), Err(_)) => Err("the driver and the library cannot be used".into()),
        (Err(_), Ok(_)) => Err("the driver cannot be used".into()),
        (Ok(_), Err(_)) => Err("the library cannot be used".into()),
    };
    match usable {
        Ok(index) => finding("cuda", true, format!("device = \"auto\" takes cuda:{index}")),
        Err(reason) => {
            let sentence = format!("{reason}: device = \"cuda:N\" is refused, and device = \"auto\" takes the CPU");
            finding("cuda", false, sentence)
        }
    }
}

/// The GPU that `device = "auto"` uses, which is always the first, or why none can be used.
fn usable(driver: &Driver, found: &OpenedLibrary) -> Result<usize, String> {
    let first = driver.gpus.first().ok_or("there is no GPU")?;
    check_fit(driver.cuda, first, found.library.description()).map(|()| 0).map_err(|missing| missing.to_string())
}

fn finding(name: &'static str, ok: bool, sentence: String) -> Finding {
    Finding { name, ok, sentence }
}
