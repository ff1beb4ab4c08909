//! Tests of the workspace itself: dependencies between crates, import cycles, vocabulary. They are in `tests/`. Tests of the command
//! line are in the `tests/` folder of its crate.
