//! What was launched, and how long it took.

use super::{gpu, halves, random, rng};
use crate::device::Gpu;

#[test]
fn launches_are_told_in_order_with_their_times_and_only_while_asked_for() {
    // A card of its own: other tests launch on theirs.
    let own = Gpu::new(0).unwrap();
    let values = own.upload(&random(&mut rng(1), 1000)).unwrap();
    let (sum, launched) = own
        .traced(|| {
            let halves = own.to_bf16(&values).unwrap();
            own.to_f32(&halves).unwrap()
        })
        .unwrap();
    let names: Vec<&str> = launched.iter().map(|launched| launched.name).collect();
    assert_eq!(names, ["to_bf16", "to_f32"]);
    assert!(launched.iter().all(|launched| launched.milliseconds >= 0.0) && sum.len() == 1000);
    let (_, nothing) = own.traced(|| ()).unwrap();
    assert_eq!(nothing, []);
    assert_eq!(gpu().to_f32(&halves(&[1.0])).unwrap().len(), 1);
}
