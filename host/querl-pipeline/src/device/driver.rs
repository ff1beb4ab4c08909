//! NVIDIA's driver, opened at run time: its version, GPUs and their free memory.

use libloading::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Why no GPU can be used, as a sentence without its first capital and full stop.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DeviceUnavailable(pub String);

/// Names another file than [`DRIVER`], for tests.
const DRIVER_VARIABLE: &str = "QUERL_CUDA_DRIVER";

/// The driver's library. Every driver brings it under this name.
const DRIVER: &str = "libcuda.so.1";

/// Older drivers are refused before a library is looked for: none of any CUDA before 12 is known to work. Whether a driver is new
/// enough for the library that was found is asked of both ([`check_fit`](crate::device::check_fit)).
const OLDEST: u32 = 12_000;

/// Result of probing for the driver.
#[derive(Debug)]
pub enum Probe {
    /// No driver on this machine.
    Absent,
    /// It does not work; the reason.
    Broken(String),
    /// It works.
    Present(Driver),
}

/// A working driver.
#[derive(Debug)]
pub struct Driver {
    library: Library,
    /// The newest CUDA it supports: 13000 is 13.0.
    pub cuda: u32,
    /// GPUs in its order.
    pub gpus: Vec<Gpu>,
}

/// A GPU as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Product name.
    pub name: String,
    /// Total memory.
    pub memory_bytes: u64,
    /// Compute capability: 90 is 9.0.
    pub capability: u32,
}

/// 13000 as `13.0`.
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
    pub fn ask() -> Self {
        let name = std::env::var_os(DRIVER_VARIABLE).unwrap_or_else(|| DRIVER.into());
        // SAFETY: the library's initialisers are the driver's own; every CUDA program runs them.
        let Ok(library) = (unsafe { Library::new(name) }) else { return Self::Absent };
        Driver::ask(library).map_or_else(Self::Broken, Self::Present)
    }

    /// The driver, if it works and is new enough.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn driver(self) -> Result<Driver, DeviceUnavailable> {
        match self {
            Self::Absent => Err(DeviceUnavailable(format!("there is no CUDA driver ({DRIVER}) on this machine"))),
            Self::Broken(reason) => Err(DeviceUnavailable(format!("the CUDA driver does not work: {reason}"))),
            Self::Present(driver) if driver.cuda < OLDEST => {
                let (found, oldest) = (version_name(driver.cuda), version_name(OLDEST));
                Err(DeviceUnavailable(format!(
                    "the CUDA driver supports CUDA {found}; expected {oldest} or newer, so update it"
                )))
            }
            Self::Present(driver) if driver.gpus.is_empty() => {
                Err(DeviceUnavailable("the CUDA driver sees no card".into()))
            }
            Self::Present(driver) => Ok(driver),
        }
    }
}

impl Driver {
    fn ask(library: Library) -> Result<Self, String> {
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

    /// Free memory of a GPU.
    ///
    /// # Errors
    /// The driver's, in words.
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
unsafe fn function<'a, T>(library: &'a Library, name: &str) -> Result<Symbol<'a, T>, String> {
    // SAFETY: as the caller promises.
    unsafe { library.get(name.as_bytes()) }.map_err(|error| error.to_string())
}

fn device(library: &Library, index: c_int) -> Result<c_int, String> {
    let mut device = 0;
    // SAFETY: `CUresult cuDeviceGet(CUdevice *, int)`, and a `CUdevice` is an integer.
    succeed("cuDeviceGet", unsafe { function::<GetDevice>(library, "cuDeviceGet")?(&raw mut device, index) })?;
    Ok(device)
}

fn gpu(library: &Library, index: c_int) -> Result<Gpu, String> {
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
