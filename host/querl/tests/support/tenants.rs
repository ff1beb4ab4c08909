//! Finished runs of two tenants with the same base model.

use super::Project;
use super::results::copy;
use std::sync::LazyLock;

/// The runs `run` and `other`; the first was evaluated with beam search.
pub static RUNS: LazyLock<Project> = LazyLock::new(|| {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--set", "eval.n_beams=3"]).ok();
    project
        .edit("tenant = \"fivedoctors\"\noutput_dir = \"run\"", "tenant = \"other\"\noutput_dir = \"other\"\nseed = 7");
    project.edit("learning_rate = 1e-3\nmax_steps = 2", "learning_rate = 0.1\nmax_steps = 6");
    project.querl(&["run", "querl.toml"]).ok();
    project
});

/// Copies of the runs, which a test may change.
pub fn project() -> Project {
    let project = Project::new();
    for folder in ["run", "other"] {
        copy(&RUNS.path(folder), &project.path(folder));
    }
    project
}
