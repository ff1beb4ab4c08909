//! The loop around learning: parts that overlap, rollouts that run ahead, stops and kills, stragglers.
#![allow(clippy::unwrap_used)]

mod ahead;
mod parts;
mod ranks;
#[path = "../support/recording.rs"]
mod recording;
mod resume;
#[path = "../support/tiny.rs"]
mod tiny;
mod world;
