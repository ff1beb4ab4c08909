//! The minimum of a smooth function.

use std::collections::VecDeque;

/// Differences that are remembered, as scipy's default.
const MEMORY: usize = 10;
/// Share of the expected decrease that a step must bring.
const SUFFICIENT: f64 = 1e-4;

/// Where a function of many values is least. `function` writes the gradient and returns the value. Ends where no part of the
/// gradient exceeds `tolerance`, after `max_steps`, or where no step brings less.
///
/// Source: Nocedal and Wright, "Numerical Optimization", algorithms 7.4 and 3.1.
pub(super) fn minimise(
    mut function: impl FnMut(&[f64], &mut [f64]) -> f64,
    start: Vec<f64>,
    (tolerance, max_steps): (f64, usize),
) -> Vec<f64> {
    let (mut x, mut gradient) = (start, Vec::new());
    gradient.resize(x.len(), 0.0);
    let mut value = function(&x, &mut gradient);
    let mut history: VecDeque<Difference> = VecDeque::new();
    for _ in 0..max_steps {
        if gradient.iter().all(|part| part.abs() <= tolerance) {
            break;
        }
        let direction = descent(&gradient, &history);
        let slope = dot(&direction, &gradient);
        let first = if history.is_empty() { 1.0 / dot(&gradient, &gradient).sqrt().max(1.0) } else { 1.0 };
        let Some((next, next_value, next_gradient)) =
            step(&mut function, (x.as_slice(), value), &direction, (slope, first))
        else {
            break;
        };
        let change: Vec<f64> = next.iter().zip(&x).map(|(new, old)| new - old).collect();
        let turn: Vec<f64> = next_gradient.iter().zip(&gradient).map(|(new, old)| new - old).collect();
        let curvature = dot(&change, &turn);
        // Only what curves upwards says something of the function's shape.
        if curvature > f64::EPSILON * dot(&turn, &turn) {
            history.push_back(Difference { change, turn, curvature });
            if history.len() > MEMORY {
                history.pop_front();
            }
        }
        (x, value, gradient) = (next, next_value, next_gradient);
    }
    x
}

struct Difference {
    change: Vec<f64>,
    turn: Vec<f64>,
    curvature: f64,
}

/// The direction in which the remembered curvature says that the minimum is.
fn descent(gradient: &[f64], history: &VecDeque<Difference>) -> Vec<f64> {
    let mut direction: Vec<f64> = gradient.iter().map(|part| -part).collect();
    let mut shares = Vec::with_capacity(history.len());
    for Difference { change, turn, curvature } in history.iter().rev() {
        let share = dot(change, &direction) / curvature;
        direction.iter_mut().zip(turn).for_each(|(d, t)| *d -= share * t);
        shares.push(share);
    }
    if let Some(Difference { turn, curvature, .. }) = history.back() {
        let scale = curvature / dot(turn, turn);
        direction.iter_mut().for_each(|d| *d *= scale);
    }
    for (Difference { change, turn, curvature }, share) in history.iter().zip(shares.into_iter().rev()) {
        let back = share - dot(turn, &direction) / curvature;
        direction.iter_mut().zip(change).for_each(|(d, c)| *d += back * c);
    }
    direction
}

/// Halves a step until it brings enough.
fn step(
    function: &mut impl FnMut(&[f64], &mut [f64]) -> f64,
    (x, value): (&[f64], f64),
    direction: &[f64],
    (slope, first): (f64, f64),
) -> Option<(Vec<f64>, f64, Vec<f64>)> {
    let (mut length, mut gradient) = (first, vec![0.0; x.len()]);
    for _ in 0..60 {
        let next: Vec<f64> = x.iter().zip(direction).map(|(x, d)| x + length * d).collect();
        let next_value = function(&next, &mut gradient);
        if next_value <= value + SUFFICIENT * length * slope {
            return Some((next, next_value, gradient));
        }
        length /= 2.0;
    }
    None
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
