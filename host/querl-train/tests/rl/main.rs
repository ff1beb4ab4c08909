//! Whole trainings on tiny random models: PPO and the other algorithms, small tasks with a known optimum, overlapped rollouts, stops and
//! kills, several ranks.
#![allow(clippy::unwrap_used)]

mod learning;
mod pipeline;
mod ppo;
mod ranks;
mod resume;
mod support;
mod tensor_parallel;
