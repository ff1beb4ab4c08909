//! Finds NVIDIA's NCCL, which several GPUs need: opened when it is needed, never linked. The program that reports its version and
//! the library that calls it both look here, so that they accept the same releases.
//!
//! cudarc's `nccl` module is not used (0.19.10): candle-core 0.11 selects cudarc's feature `dynamic-linking`, with which the build needs
//! `libnccl.so` and a library that calls it does not load on a machine without NCCL, so not on one with a single GPU; with
//! `dynamic-loading`, cudarc looks for `libnccl.so` but not for `libnccl.so.2`, the only name in NVIDIA's wheels and in runtime
//! packages, and panics where it finds none.

use libloading::Library;
use std::ffi::c_int;
use std::sync::OnceLock;

/// File name of the library since NCCL 2.
const LIBRARY: &str = "libnccl.so.2";

/// 2.26.2, the oldest release in which a failed rank can abort the others. Before 2.19, aborts in several threads waited for each other
/// (NVIDIA/nccl issue 992), and 2.25.1 hangs in `ncclCommAbort` (pytorch/pytorch issue 149153, fixed by 2.26.2).
const OLDEST: c_int = 22_602;

/// Why NCCL cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NcclError(String);

/// NCCL of a supported version, open until the process ends.
#[derive(Debug)]
pub struct NcclLibrary {
    /// The opened library, to look up functions in.
    pub library: Library,
    /// Version number, such as 22809 for 2.28.9; see [`nccl_version_name`].
    pub version: c_int,
}

impl NcclLibrary {
    /// Version number of the oldest supported release.
    pub const OLDEST: c_int = OLDEST;

    /// Opens the library at the first call, and returns it.
    ///
    /// # Errors
    /// There is none, it cannot be opened, or it is too old; the message says what to do.
    pub fn open() -> Result<&'static Self, NcclError> {
        static FOUND: OnceLock<Result<NcclLibrary, NcclError>> = OnceLock::new();
        FOUND.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, NcclError> {
        check_blocking(std::env::var("NCCL_COMM_BLOCKING").ok().as_deref())?;
        // SAFETY: loading runs only NCCL's own initialisers, as in every program that uses NCCL.
        let library =
            unsafe { Library::new(LIBRARY) }.map_err(|error| wanting(&format!("cannot be opened ({error})")))?;
        let mut version = 0;
        // SAFETY: `ncclResult_t ncclGetVersion(int *)` in every version.
        let status = unsafe {
            let function = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion");
            function.map_err(|_| wanting("has no function `ncclGetVersion`"))?(&raw mut version)
        };
        match status {
            0 => check(version).map(|()| Self { library, version }),
            _ => Err(wanting(&format!("does not report its version (error {status})"))),
        }
    }
}

/// The version of the installed NCCL, such as `2.28.9`.
///
/// # Errors
/// There is none, it cannot be opened, or it is too old; the message says what to do.
pub fn nccl_version() -> Result<String, NcclError> {
    NcclLibrary::open().map(|found| nccl_version_name(found.version))
}

fn check(version: c_int) -> Result<(), NcclError> {
    let (found, oldest) = (nccl_version_name(version), nccl_version_name(OLDEST));
    match version >= OLDEST {
        true => Ok(()),
        false => Err(wanting(&format!("is NCCL {found}; expected {oldest} or newer"))),
    }
}

/// Refuses `NCCL_COMM_BLOCKING`, which overrides the communicator's configuration: in blocking calls ranks would hang when another one
/// fails.
fn check_blocking(set: Option<&str>) -> Result<(), NcclError> {
    match set {
        None | Some("" | "0") => Ok(()),
        Some(other) => {
            let what = "NCCL_COMM_BLOCKING in the environment is";
            Err(NcclError(format!("several GPUs need NCCL that does not block, and {what} {other:?}; unset it")))
        }
    }
}

fn wanting(what: &str) -> NcclError {
    let remedy = "`pip install nvidia-nccl-cu13` (`-cu12` for CUDA 12) or the NCCL package brings it; name its folder in LD_LIBRARY_PATH";
    NcclError(format!("several GPUs need NCCL, and {LIBRARY} {what}: {remedy}"))
}

/// A version number of NCCL as text: 22809 as `2.28.9`, and 2804, in the scheme before 2.9, as `2.8.4`.
pub fn nccl_version_name(version: c_int) -> String {
    let of_major = if version < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", version / of_major, version % of_major / 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_named_as_nvidia_names_them() {
        let names = [22_809, 22_602, 21_000, 2_804].map(nccl_version_name);
        assert_eq!(names, ["2.28.9", "2.26.2", "2.10.0", "2.8.4"]);
    }

    #[test]
    fn a_library_with_which_ranks_would_hang_is_refused() {
        let refused = [2_804, 22_501].map(|version| check(version).unwrap_err().to_string());
        assert!(refused[0].contains("libnccl.so.2 is NCCL 2.8.4; expected 2.26.2 or newer: "), "{refused:?}");
        assert!(refused[1].contains("is NCCL 2.25.1; "), "{refused:?}");
        assert!(check(OLDEST).is_ok() && check(22_809).is_ok());
        assert!(check_blocking(None).is_ok() && check_blocking(Some("0")).is_ok());
        assert!(
            check_blocking(Some("1"))
                .unwrap_err()
                .to_string()
                .ends_with("NCCL_COMM_BLOCKING in the environment is \"1\"; unset it")
        );
    }
}
