use super::*;

/// A card of one's own: a stream that nobody else uses.
fn beside() -> Gpu {
    gpu().beside().unwrap()
}

#[test]
fn what_is_recorded_is_done_each_time_it_is_launched() {
    let gpu = beside();
    let (mut sum, x) = (gpu.upload(&[1f32, 2.0, 3.0]).unwrap(), gpu.upload(&[10f32, 20.0, 30.0]).unwrap());
    // SAFETY: `sum` and `x` are there until the end, and only this thread uses them.
    let mut graph = unsafe { gpu.recorded(|| gpu.add(&mut sum, &x)) }.unwrap();
    assert_eq!(gpu.download(&sum).unwrap(), [1.0, 2.0, 3.0], "recording does nothing");
    for n in 1..4 {
        graph.launch().unwrap();
        let n = n as f32;
        assert_eq!(gpu.download(&sum).unwrap(), [1.0 + n * 10.0, 2.0 + n * 20.0, 3.0 + n * 30.0]);
    }
}

#[test]
fn what_cannot_be_recorded_is_an_error_and_the_stream_goes_on() {
    let gpu = beside();
    let x = gpu.upload(&[1f32, 2.0]).unwrap();
    // SAFETY: neither work hands anything to the card.
    let refused = unsafe { gpu.recorded(|| gpu.synchronize()) };
    assert!(refused.is_err(), "a wait was recorded");
    // SAFETY: as above.
    let failed = unsafe { gpu.recorded(|| candle_core::bail!("a fault of the work")) }.err().unwrap();
    assert!(failed.to_string().contains("a fault of the work"), "{failed}");
    assert_eq!(gpu.download(&gpu.copy(&x).unwrap()).unwrap(), [1.0, 2.0]);
}

#[test]
fn work_beside_comes_after_what_it_waits_for() {
    let other = beside();
    let x = gpu().upload(&[1f32, -2.0, 0.5]).unwrap();
    other.wait_for(gpu()).unwrap();
    let y = other.copy(&x).unwrap();
    gpu().wait_for(&other).unwrap();
    drop(x);
    assert_eq!(other.download(&y).unwrap(), [1.0, -2.0, 0.5]);
}
