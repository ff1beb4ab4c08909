//! A fake CUDA driver: a library that answers the program's queries with values from the environment, for tests of messages on machines
//! without a GPU. The tests compile it with `rustc --crate-type cdylib`.

use std::ffi::{c_char, c_int, c_uint, c_void};

fn figure(name: &str, default: i64) -> i64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_: c_uint) -> c_int {
    figure("FAKE_INIT", 0) as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    unsafe { *version = figure("FAKE_CUDA", 13000) as c_int };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    unsafe { *count = figure("FAKE_GPUS", 2) as c_int };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, index: c_int) -> c_int {
    unsafe { *device = index };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> c_int {
    let text = format!("Imagined {device}\0");
    assert!(text.len() <= len as usize);
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _: c_int) -> c_int {
    unsafe { *bytes = 80 << 30 };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _: c_int) -> c_int {
    let capability = figure("FAKE_CAPABILITY", 90) as c_int;
    unsafe { *value = if attribute == 75 { capability / 10 } else { capability % 10 } };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _: c_int) -> c_int {
    unsafe { *context = std::ptr::dangling_mut::<u64>().cast() };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(_: *mut c_void) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
    unsafe { *context = std::ptr::null_mut() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    unsafe { (*free, *total) = (figure("FAKE_FREE_GIB", 60) as usize * (1 << 30), 80 << 30) };
    0
}
