//! Goldens as values.
#![allow(clippy::unwrap_used, dead_code)]

use querl_train::rl::losses::Rows;
use serde_json::Value;
use std::path::Path;

pub(crate) const TOLERANCE: f32 = 2e-5;

pub(crate) fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

pub(crate) fn number(value: &Value) -> f32 {
    value.as_f64().unwrap() as f32
}

pub(crate) fn row(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(number).collect()
}

pub(crate) fn rows(value: &Value) -> Rows {
    value.as_array().unwrap().iter().map(row).collect()
}

pub(crate) fn mask(value: &Value) -> Vec<Vec<bool>> {
    rows(value).iter().map(|row| row.iter().map(|keep| *keep != 0.0).collect()).collect()
}

pub(crate) fn close(found: f32, expected: f32) -> bool {
    (found - expected).abs() <= TOLERANCE * expected.abs().max(1.0)
}

/// References leave whatever was computed at masked positions; querl puts 0 there.
pub(crate) fn assert_rows(what: &str, found: &Rows, expected: &Rows, mask: &[Vec<bool>]) {
    for (b, mask) in mask.iter().enumerate() {
        for (t, keep) in mask.iter().enumerate() {
            let (found, expected) = (found[b][t], if *keep { expected[b][t] } else { 0.0 });
            assert!(close(found, expected), "{what}[{b}][{t}]: {found}, expected {expected}");
        }
    }
}
