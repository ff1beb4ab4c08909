//! The CUDA driver and the library `libquerl_cuda`, both opened at run time.

use libloading::Symbol;
use querl_train::job::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

/// Why no GPU can be used; lower case and without a full stop, to be part of a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DeviceUnavailable(pub String);

/// Replaces [`DRIVER_FILE`], for tests.
const DRIVER_VARIABLE: &str = "QUERL_CUDA_DRIVER";

/// The driver's library, which has this name on every Linux.
const DRIVER_FILE: &str = "libcuda.so.1";

/// Drivers older than this are rejected before a library is opened: none of CUDA before 12 is known to work. Whether a driver is new enough
/// for the library is checked with both ([`check_fit`](crate::device::check_fit)).
const OLDEST: u32 = 12_000;

/// Result of probing for the driver.
#[derive(Debug)]
pub enum Probe {
    /// This machine has no CUDA driver.
    Absent,
    /// The driver does not work, with the reason.
    Broken(String),
    /// The driver works.
    Present(Driver),
}

/// A working CUDA driver.
#[derive(Debug)]
pub struct Driver {
    library: libloading::Library,
    /// Newest CUDA version that the driver supports: 13000 is 13.0.
    pub cuda: u32,
    /// GPUs in the driver's order.
    pub gpus: Vec<Gpu>,
}

/// A GPU as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Product name, as reported by the driver.
    pub name: String,
    /// Total memory in bytes.
    pub memory_bytes: u64,
    /// Compute capability: 90 is 9.0.
    pub capability: u32,
}

/// Formats a CUDA version: 13000 as `13.0`.
pub fn version_name(cuda: u32) -> String {
    format!("{}.{}", cuda / 1000, cuda % 1000 / 10)
}

type Init = unsafe extern "C" fn(c_uint) -> c_int;
type GetInt = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetDevice = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
type GetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
type GetMemory = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
type Release = unsafe extern "C" fn(c_int) -> c_int;
type GetCurrent = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_int;
type GetFree = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `_MINOR`.
const CAPABILITY: [c_int; 2] = [75, 76];

impl Probe {
    /// Opens the driver library and queries its GPUs.
    pub fn open() -> Self {
        let name = std::env::var_os(DRIVER_VARIABLE).unwrap_or_else(|| DRIVER_FILE.into());
        // SAFETY: the library's initialisers are the driver's own; every CUDA program runs them.
        let Ok(library) = (unsafe { libloading::Library::new(name) }) else { return Self::Absent };
        Driver::open(library).map_or_else(Self::Broken, Self::Present)
    }

    /// The driver, if it works and is new enough.
    ///
    /// # Errors
    /// There is no driver, it does not work, or it is too old.
    pub fn driver(self) -> Result<Driver, DeviceUnavailable> {
        match self {
            Self::Absent => Err(DeviceUnavailable(format!("there is no CUDA driver ({DRIVER_FILE}) on this machine"))),
            Self::Broken(reason) => Err(DeviceUnavailable(format!("the CUDA driver does not work: {reason}"))),
            Self::Present(driver) if driver.cuda < OLDEST => {
                let (found, oldest) = (version_name(driver.cuda), version_name(OLDEST));
                Err(DeviceUnavailable(format!(
                    "the CUDA driver supports CUDA {found}; expected {oldest} or newer, so update it"
                )))
            }
            Self::Present(driver) if driver.gpus.is_empty() => {
                Err(DeviceUnavailable("the CUDA driver sees no GPU".into()))
            }
            Self::Present(driver) => Ok(driver),
        }
    }
}

impl Driver {
    fn open(library: libloading::Library) -> Result<Self, String> {
        // SAFETY: `CUresult cuInit(unsigned int)` in every version of the driver interface, whose only flag is 0.
        succeed("cuInit", unsafe { function::<Init>(&library, "cuInit")?(0) })?;
        let count = |name| {
            let mut value = 0;
            // SAFETY: both functions asked for are `CUresult f(int *)`, and write one integer.
            succeed(name, unsafe { function::<GetInt>(&library, name)?(&raw mut value) })?;
            Ok::<u32, String>(u32::try_from(value).unwrap_or(0))
        };
        let (cuda, n_gpus) = (count("cuDriverGetVersion")?, count("cuDeviceGetCount")?);
        let gpus = (0..n_gpus).map(|index| gpu(&library, index as c_int)).collect::<Result<_, String>>()?;
        Ok(Self { library, cuda, gpus })
    }

    /// Free memory of the GPU with this index, in bytes.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn free_bytes(&self, index: usize) -> Result<u64, String> {
        let device = device(&self.library, index as c_int)?;
        let (retain, release, get, set, get_free) = (
            // SAFETY: `CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice)`.
            unsafe { function::<Retain>(&self.library, "cuDevicePrimaryCtxRetain")? },
            // SAFETY: `CUresult cuDevicePrimaryCtxRelease_v2(CUdevice)`.
            unsafe { function::<Release>(&self.library, "cuDevicePrimaryCtxRelease_v2")? },
            // SAFETY: `CUresult cuCtxGetCurrent(CUcontext *)`.
            unsafe { function::<GetCurrent>(&self.library, "cuCtxGetCurrent")? },
            // SAFETY: `CUresult cuCtxSetCurrent(CUcontext)`.
            unsafe { function::<SetCurrent>(&self.library, "cuCtxSetCurrent")? },
            // SAFETY: `CUresult cuMemGetInfo_v2(size_t *, size_t *)`.
            unsafe { function::<GetFree>(&self.library, "cuMemGetInfo_v2")? },
        );
        let (mut context, mut before, mut free, mut total) = (std::ptr::null_mut(), std::ptr::null_mut(), 0, 0);
        // SAFETY: the pointers are to live locals; a context that is retained is released below.
        unsafe {
            succeed("cuCtxGetCurrent", get(&raw mut before))?;
            succeed("cuDevicePrimaryCtxRetain", retain(&raw mut context, device))?;
        }
        // SAFETY: the context is retained until this thread has its former one again, and the pointers are to live locals.
        let code = unsafe {
            let code = match set(context) {
                0 => get_free(&raw mut free, &raw mut total),
                code => code,
            };
            set(before);
            release(device);
            code
        };
        succeed("cuMemGetInfo", code)?;
        Ok(free as u64)
    }
}

/// # Safety
/// `T` is the type of the function of that name in every version of the driver interface.
unsafe fn function<'a, T>(library: &'a libloading::Library, name: &str) -> Result<Symbol<'a, T>, String> {
    // SAFETY: as the caller promises.
    unsafe { library.get(name.as_bytes()) }.map_err(|error| error.to_string())
}

fn device(library: &libloading::Library, index: c_int) -> Result<c_int, String> {
    let mut device = 0;
    // SAFETY: `CUresult cuDeviceGet(CUdevice *, int)`, and a `CUdevice` is an integer.
    succeed("cuDeviceGet", unsafe { function::<GetDevice>(library, "cuDeviceGet")?(&raw mut device, index) })?;
    Ok(device)
}

fn gpu(library: &libloading::Library, index: c_int) -> Result<Gpu, String> {
    let device = device(library, index)?;
    let mut name = [0 as c_char; 256];
    // SAFETY: `CUresult cuDeviceGetName(char *, int, CUdevice)`.
    let get_name = unsafe { function::<GetName>(library, "cuDeviceGetName")? };
    // SAFETY: the function writes at most one less than the given length, and a null after it.
    succeed("cuDeviceGetName", unsafe { get_name(name.as_mut_ptr(), name.len() as c_int - 1, device) })?;
    // SAFETY: the last byte is null whatever was written.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut memory = 0usize;
    // SAFETY: `CUresult cuDeviceTotalMem_v2(size_t *, CUdevice)`, which writes one number.
    let total = unsafe { function::<GetMemory>(library, "cuDeviceTotalMem_v2")?(&raw mut memory, device) };
    succeed("cuDeviceTotalMem", total)?;
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: `CUresult cuDeviceGetAttribute(int *, CUdevice_attribute, CUdevice)`, which writes one integer.
        let code = unsafe { function::<GetAttribute>(library, "cuDeviceGetAttribute")?(&raw mut value, which, device) };
        succeed("cuDeviceGetAttribute", code).map(|()| u32::try_from(value).unwrap_or(0))
    };
    let capability = attribute(CAPABILITY[0])? * 10 + attribute(CAPABILITY[1])?;
    Ok(Gpu { name, memory_bytes: memory as u64, capability })
}

fn succeed(name: &str, code: c_int) -> Result<(), String> {
    match code {
        0 => Ok(()),
        100 => Err(format!("{name} finds no device")),
        803 => Err(format!("{name} finds a driver and a kernel module of different versions; restart the machine")),
        code => Err(format!("{name} fails with CUDA error {code}")),
    }
}

/// Path of the library, if it is not in one of the folders of [`find_library`].
const LIBRARY_VARIABLE: &str = "QUERL_CUDA_LIBRARY";

const LIBRARY_FILE: &str = "libquerl_cuda.so";

/// An opened `libquerl_cuda` whose version is that of this program.
#[derive(Debug)]
pub struct OpenedLibrary {
    /// The opened library.
    pub library: Library,
    /// Path of the library's file.
    pub path: PathBuf,
}

/// Opens `libquerl_cuda`: at the path in `QUERL_CUDA_LIBRARY`, or in one of the default folders near the program.
///
/// # Errors
/// There is none, it cannot be opened, or it is of another version.
pub fn open_library() -> Result<OpenedLibrary, DeviceUnavailable> {
    let path = find_library()?;
    let library = load_library(&path).map_err(|reason| DeviceUnavailable(format!("{}: {reason}", path.display())))?;
    Ok(OpenedLibrary { library, path })
}

fn find_library() -> Result<PathBuf, DeviceUnavailable> {
    if let Some(named) = std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from) {
        let message = || {
            DeviceUnavailable(format!("{LIBRARY_VARIABLE} names {}; there is no file at that place", named.display()))
        };
        return if named.is_file() { Ok(named) } else { Err(message()) };
    }
    let program = std::env::current_exe().unwrap_or_default();
    let folder = program.parent().unwrap_or(Path::new("."));
    // `cuda` first: build.sh puts the library there, while a build of the whole workspace puts one without CUDA into the program's folder.
    let folders = ["cuda", "", "lib", "../lib"].map(|inner| folder.join(inner));
    let paths = folders.map(|folder| folder.join(LIBRARY_FILE));
    paths.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        DeviceUnavailable(format!(
            "there is no {LIBRARY_FILE} in the folder of the program, {}, in its folders cuda and lib or in ../lib; build it with host/querl-gpu/build.sh, or name it in {LIBRARY_VARIABLE}",
            folder.display()
        ))
    })
}

fn load_library(path: &Path) -> Result<Library, String> {
    // SAFETY: opening a library runs its initialisers. The user put this one into the folder of the program or named it; it is as trusted
    // as the program itself.
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

/// The package that provides the missing file in a loader's message.
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
mod tests {
    use super::*;

    /// Regression: without a driver the message named CUDA's libraries, which were installed.
    #[test]
    fn a_missing_file_is_reported_with_what_provides_it() {
        let of = |name| remedy(&format!("{name}: cannot open shared object file: No such file or directory"));
        assert!(of("libcuda.so.1").unwrap().contains("NVIDIA's driver"));
        for name in ["libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10"] {
            assert!(of(name).unwrap().contains("LD_LIBRARY_PATH"));
        }
        assert_eq!(of("libstdc++.so.6"), None);
    }
}
