//! Is there a CUDA driver, and what does it say? Asked through the driver's own library, which is opened only here: a program
//! linked with it would not start on a machine without one.

use libloading::{Library, Symbol};
use std::ffi::c_int;

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Driver {
    /// No driver library on this machine.
    Absent,
    /// There is one, and it does not work. Why, in words.
    Broken(String),
    /// It works.
    Present {
        /// The newest CUDA it supports, such as `13.0`.
        cuda_version: String,
        /// Devices it sees.
        n_devices: usize,
    },
}

type Init = unsafe extern "C" fn(u32) -> c_int;
type GetInt = unsafe extern "C" fn(*mut c_int) -> c_int;

/// Asks the driver.
pub fn probe() -> Driver {
    // SAFETY: the library's initialisers are the driver's own; every CUDA program runs them.
    let Ok(library) = (unsafe { Library::new("libcuda.so.1") }) else { return Driver::Absent };
    ask(&library).unwrap_or_else(Driver::Broken)
}

fn ask(library: &Library) -> Result<Driver, String> {
    // SAFETY: `cuInit` is `CUresult cuInit(unsigned int)` in every version of the driver interface, and 0 is its only flag.
    let init: Symbol<'_, Init> = unsafe { library.get(b"cuInit\0") }.map_err(|error| error.to_string())?;
    // SAFETY: as above.
    succeed("cuInit", unsafe { init(0) })?;
    let version = get_int(library, "cuDriverGetVersion")?;
    let n_devices = get_int(library, "cuDeviceGetCount")?;
    let cuda_version = format!("{}.{}", version / 1000, version % 1000 / 10);
    Ok(Driver::Present { cuda_version, n_devices: usize::try_from(n_devices).unwrap_or(0) })
}

fn get_int(library: &Library, name: &str) -> Result<c_int, String> {
    // SAFETY: both functions asked for are `CUresult f(int *)` in every version of the driver interface.
    let function: Symbol<'_, GetInt> = unsafe { library.get(name.as_bytes()) }.map_err(|error| error.to_string())?;
    let mut value = 0;
    // SAFETY: the pointer is to a live integer, which the function writes once.
    succeed(name, unsafe { function(&raw mut value) })?;
    Ok(value)
}

fn succeed(name: &str, code: c_int) -> Result<(), String> {
    match code {
        0 => Ok(()),
        100 => Err(format!("{name} finds no device")),
        code => Err(format!("{name} fails with CUDA error {code}")),
    }
}
