//! NCCL, which several cards sum with. The library of devices opens it; here it is only asked for its version.

use super::Missing;
use libloading::Library;
use std::ffi::c_int;

/// Every NCCL 2 brings its library under this name.
const LIBRARY: &str = "libnccl.so.2";

/// NCCL's version, such as `2.28.9`.
///
/// # Errors
/// There is none that can be opened.
pub fn nccl() -> Result<String, Missing> {
    let remedy = "`pip install nvidia-nccl-cu13` or the NCCL package brings it; name its folder in LD_LIBRARY_PATH";
    let missing = |reason: String| Missing(format!("{LIBRARY} {reason}: {remedy}"));
    // SAFETY: the library's initialisers are NCCL's own; every program that uses it runs them.
    let library = unsafe { Library::new(LIBRARY) }.map_err(|_| missing("is missing".into()))?;
    let mut version: c_int = 0;
    // SAFETY: `ncclResult_t ncclGetVersion(int *)` in every version.
    let status = unsafe {
        let function = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion");
        function.map_err(|_| missing("has no function `ncclGetVersion`".into()))?(&raw mut version)
    };
    match status {
        0 => Ok(format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)),
        _ => Err(missing(format!("does not tell its version (error {status})"))),
    }
}
