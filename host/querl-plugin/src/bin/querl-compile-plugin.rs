//! Compiles one component for a host whose compiler is this program: `querl-compile-plugin COMPONENT OUTPUT TIMEOUT_MS`.
//!
//! The `querl` command does this itself; this program is for tests, and for others that use the library.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let timeout_ms = args.get(2).and_then(|text| text.to_str()?.parse().ok());
    let (Some(timeout_ms), [input, output, _]) = (timeout_ms, args.as_slice()) else {
        eprintln!("usage: querl-compile-plugin COMPONENT OUTPUT TIMEOUT_MS");
        return ExitCode::from(2);
    };
    match querl_plugin::compile_child(&PathBuf::from(input), &PathBuf::from(output), timeout_ms) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
