//! Datasets: rows and records in files, the journal of a stage, splits, leaks between them, augmentation, dialogues, exported tables.

pub(crate) mod augment;
pub(crate) mod dialogues;
pub(crate) mod export;
pub(crate) mod journal;
pub(crate) mod leaks;
pub(crate) mod rows;
pub(crate) mod splits;
