//! Compiles the kernels of `cuda/` for the feature `cuda`: one file that holds them for each capability, `kernels.fatbin`. Without
//! the feature it does nothing.
//!
//! `NVCC`, or else the `nvcc` that is found, is the compiler; host/querl-gpu/toolkit.sh brings one. `QUERL_CUDA_CAPABILITIES` names
//! the capabilities (default `80,86,89,90`); the last of them also as PTX, which the driver compiles for later GPUs. The
//! crate gets both in its environment, so that a library can report them.

use std::env;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

const CAPABILITIES: &str = "80,86,89,90";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=cuda");
    println!("cargo::rerun-if-env-changed=QUERL_CUDA_CAPABILITIES");
    println!("cargo::rerun-if-env-changed=NVCC");
    if env::var_os("CARGO_FEATURE_CUDA").is_some()
        && let Err(message) = compile()
    {
        println!("cargo::error={message}");
    }
}

fn compile() -> Result<(), String> {
    let capabilities = env::var("QUERL_CUDA_CAPABILITIES").unwrap_or_else(|_| CAPABILITIES.into());
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?).join("kernels.fatbin");
    let nvcc = env::var_os("NVCC").unwrap_or_else(|| "nvcc".into());
    let status = Command::new(&nvcc)
        .args(["--fatbin", "-O3", "-std=c++17", "--threads", "2", "-o"])
        .arg(&out)
        .args(targets(&capabilities)?)
        .arg("cuda/kernels.cu")
        .status()
        .map_err(|error| {
            let nvcc = nvcc.display();
            format!("`{nvcc}`: {error}; run host/querl-gpu/toolkit.sh and source the `environment` that it writes")
        })?;
    println!("cargo::rustc-env=QUERL_BUILT_WITH_CUDA={}", version_of(&nvcc)?);
    println!("cargo::rustc-env=QUERL_BUILT_FOR_CAPABILITIES={capabilities}");
    if status.success() { Ok(()) } else { Err(format!("nvcc refused cuda/kernels.cu: {status}")) }
}

/// The version of nvcc: `13.0` from the line `Cuda compilation tools, release 13.0, V13.0.88`.
fn version_of(nvcc: &OsStr) -> Result<String, String> {
    let unknown = || format!("`{} --version` names no release", nvcc.display());
    let output = Command::new(nvcc).arg("--version").output().map_err(|_| unknown())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let release = text.split_once("release ").and_then(|(_, rest)| rest.split([',', '\n']).next());
    release.map(|release| release.trim().to_owned()).ok_or_else(unknown)
}

/// nvcc arguments for machine code of each compute capability, and PTX of the last.
fn targets(capabilities: &str) -> Result<Vec<String>, String> {
    let all: Vec<&str> = capabilities.split(',').map(str::trim).collect();
    if let Some(wrong) = all.iter().find(|name| name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_digit())) {
        return Err(format!("QUERL_CUDA_CAPABILITIES names `{wrong}`; expected numbers such as {CAPABILITIES}"));
    }
    let code = all.iter().map(|name| format!("-gencode=arch=compute_{name},code=sm_{name}"));
    let ptx = all.last().map(|name| format!("-gencode=arch=compute_{name},code=compute_{name}"));
    Ok(code.chain(ptx).collect())
}
