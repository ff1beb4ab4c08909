//! Finding and opening `libquerl_cuda`.

use super::driver::DeviceUnavailable;
use querl_train::job::Library;
use std::path::{Path, PathBuf};

/// Names the file where it is none of the places beside the program.
const LIBRARY_VARIABLE: &str = "QUERL_CUDA_LIBRARY";

const LIBRARY: &str = "libquerl_cuda.so";

/// A library of the program's version.
#[derive(Debug)]
pub struct OpenedLibrary {
    /// Its functions.
    pub library: Library,
    /// Its file.
    pub path: PathBuf,
}

/// Opens the library that the environment names, or the one beside the program.
///
/// # Errors
/// There is none, it cannot be opened, or it is of another version.
pub fn open() -> Result<OpenedLibrary, DeviceUnavailable> {
    let path = find()?;
    let library = load(&path).map_err(|reason| DeviceUnavailable(format!("{}: {reason}", path.display())))?;
    Ok(OpenedLibrary { library, path })
}

fn find() -> Result<PathBuf, DeviceUnavailable> {
    if let Some(named) = std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from) {
        let message = || {
            DeviceUnavailable(format!("{LIBRARY_VARIABLE} names {}; there is no file at that place", named.display()))
        };
        return if named.is_file() { Ok(named) } else { Err(message()) };
    }
    let program = std::env::current_exe().unwrap_or_default();
    let beside = program.parent().unwrap_or(Path::new("."));
    // `cuda` first: build.sh leaves the library there, and a build of the whole workspace one without CUDA beside the program.
    let folders = ["cuda", "", "lib", "../lib"].map(|folder| beside.join(folder));
    let places = folders.map(|folder| folder.join(LIBRARY));
    places.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        DeviceUnavailable(format!(
            "there is no {LIBRARY} beside the program, in {}, in its folders cuda and lib or in ../lib; build it with host/querl-gpu/build.sh, or name it in {LIBRARY_VARIABLE}",
            beside.display()
        ))
    })
}

fn load(path: &Path) -> Result<Library, String> {
    // SAFETY: opening a library runs its initialisers. The user put this one beside the program or named it; it is trusted as
    // the program is, as an executable plugin would be.
    let opened = unsafe { libloading::Library::new(path) }.map_err(|error| cannot_open(&error))?;
    // Never closed: its threads outlive the jobs.
    let opened: &'static libloading::Library = Box::leak(Box::new(opened));
    let find = |name: &'static str| {
        // SAFETY: the address is only looked up here; `connect` says what it takes it for.
        let symbol = unsafe { opened.get::<unsafe extern "C" fn()>(name.as_bytes()) };
        symbol.ok().map(|function| *function as *const ())
    };
    // SAFETY: a library that exports `querl_cuda_abi` is ours, and these functions stay where they are since it is not closed.
    let connected = unsafe { Library::connect(find, env!("CARGO_PKG_VERSION")) };
    connected.map_err(|error| error.to_string())
}

fn cannot_open(error: &libloading::Error) -> String {
    let text = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    let remedy = remedy(&text).map(|remedy| format!("; {remedy}")).unwrap_or_default();
    format!("cannot be opened: {text}{remedy}")
}

/// The loader names the file that is missing and not what brings it.
fn remedy(text: &str) -> Option<&'static str> {
    let names = |names: &[&str]| names.iter().any(|name| text.contains(name));
    if names(&["libcuda.so"]) {
        return Some("that file is the driver's: install NVIDIA's driver");
    }
    names(&["libcublas", "libcurand", "libcudart", "libnvrtc"]).then_some(
        "it needs the libraries of the CUDA that it was built with: install them, or name their folder in LD_LIBRARY_PATH",
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The symptom: where there was no driver, CUDA's libraries were asked for, which were there.
    #[test]
    fn what_is_missing_is_asked_for_by_what_brings_it() {
        let of = |name| remedy(&format!("{name}: cannot open shared object file: No such file or directory"));
        assert!(of("libcuda.so.1").unwrap().contains("NVIDIA's driver"));
        for name in ["libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10"] {
            assert!(of(name).unwrap().contains("LD_LIBRARY_PATH"));
        }
        assert_eq!(of("libstdc++.so.6"), None);
    }
}
