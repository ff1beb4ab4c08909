//! Device memory.

use super::gpu;

const LARGE: u64 = 512 << 20;

#[test]
fn the_peak_is_what_was_used_at_once_and_can_be_reset() {
    let gpu = gpu();
    gpu.reset_peak_memory().unwrap();
    let before = gpu.memory().unwrap();
    // More than all other tests together, which may run at the same time.
    let values = gpu.zeros::<u8>(LARGE as usize).unwrap();
    let during = gpu.memory().unwrap();
    drop(values);
    let after = gpu.memory().unwrap();
    assert!(during.peak >= LARGE && during.peak > before.peak, "{before:?} {during:?}");
    assert!(after.peak >= during.peak);
    gpu.reset_peak_memory().unwrap();
    assert!(gpu.memory().unwrap().peak < LARGE);
    assert!(after.total >= after.free + after.other());
}
