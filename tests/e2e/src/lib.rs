//! Tests of the workspace itself, in `tests/`: dependencies between crates, import cycles, vocabulary, documentation. Tests of the command
//! line are in the `tests/` folder of its crate.
