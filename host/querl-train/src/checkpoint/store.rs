//! The folder of a training's states: the newest few; a run resumes from the newest that is complete and has its fingerprint.

use super::file::ReadError;
use super::{State, file};
use crate::TrainError;
use querl_core::fsx::write_atomic_with;
use querl_core::ports::Progress;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

/// The states of one training, by step.
#[derive(Debug)]
pub struct StateStore {
    directory: PathBuf,
    keep: usize,
    fingerprint: String,
}

impl StateStore {
    /// The states in `directory`, which need not exist yet. The newest `keep` are kept. `fingerprint` is a digest of everything that
    /// the training depends on: a state with another one is not resumed.
    pub fn open(directory: &Path, keep: usize, fingerprint: &str) -> Self {
        Self { directory: directory.to_owned(), keep: keep.max(1), fingerprint: fingerprint.to_owned() }
    }

    /// Writes the state of `step` atomically and synced; then removes old ones, and those of later steps from an earlier attempt.
    ///
    /// # Errors
    /// The file cannot be written: earlier states are unchanged.
    pub fn write(&self, step: u64, state: &State) -> Result<(), TrainError> {
        self.commit(step, |to| file::write(to, step, &self.fingerprint, state))
    }

    fn commit(
        &self,
        step: u64,
        fill: impl FnOnce(&mut BufWriter<&mut File>) -> io::Result<()>,
    ) -> Result<(), TrainError> {
        let path = self.path(step);
        let failed = |source| TrainError::Checkpoint { path: path.clone(), source };
        write_atomic_with(&path, fill).and_then(|()| self.sync_folder()).map_err(failed)?;
        self.remove_others(step).map_err(failed)
    }

    /// The newest state to resume from, with its step. Each that is damaged or of another training is skipped with a warning.
    ///
    /// # Errors
    /// The folder or a file in it cannot be read.
    pub fn newest(&self, warn: &dyn Progress) -> Result<Option<(u64, State)>, TrainError> {
        let io = |source| TrainError::Io { path: self.directory.clone(), source };
        let mut damaged = Vec::new();
        for step in self.steps().map_err(io)?.into_iter().rev() {
            let path = self.path(step);
            match file::read(&path) {
                Ok(found) if found.fingerprint == self.fingerprint && found.step == step => {
                    warn_of(&damaged, &format!("the checkpoint of step {step} is used"), warn);
                    return Ok(Some((step, found.state)));
                }
                Ok(_) => warn.line(&format!(
                    "warning: {}: belongs to a training on other inputs; not resumed from it",
                    path.display()
                )),
                Err(ReadError::Damaged(what)) => damaged.push(format!("{}: {what}", path.display())),
                Err(ReadError::Io(source)) => return Err(TrainError::Io { path, source }),
            }
        }
        warn_of(&damaged, "no complete checkpoint is left, and the stage starts from the beginning", warn);
        Ok(None)
    }

    fn path(&self, step: u64) -> PathBuf {
        self.directory.join(format!("step-{step}.state"))
    }

    /// Steps that have a file, ascending.
    fn steps(&self) -> io::Result<Vec<u64>> {
        let entries = match std::fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut steps = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let number: Option<u64> =
                name.to_str().and_then(|name| name.strip_prefix("step-")?.strip_suffix(".state")?.parse().ok());
            steps.extend(number);
        }
        steps.sort_unstable();
        Ok(steps)
    }

    fn remove_others(&self, newest: u64) -> io::Result<()> {
        let (mut kept, later): (Vec<u64>, Vec<u64>) = self.steps()?.into_iter().partition(|step| *step <= newest);
        let old = kept.drain(..kept.len().saturating_sub(self.keep));
        old.chain(later).try_for_each(|step| std::fs::remove_file(self.path(step)))
    }

    /// Makes a rename survive a power failure.
    fn sync_folder(&self) -> io::Result<()> {
        if cfg!(unix) { File::open(&self.directory)?.sync_all() } else { Ok(()) }
    }
}

fn warn_of(damaged: &[String], consequence: &str, warn: &dyn Progress) {
    damaged.iter().for_each(|what| warn.line(&format!("warning: {what}; {consequence}")));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use querl_core::ports::Silent;
    use std::io::Write;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Lines(Mutex<Vec<String>>);

    impl Progress for Lines {
        fn update(&self, _: u64, _: u64, _: &str) {}

        fn line(&self, text: &str) {
            self.0.lock().unwrap().push(text.to_owned());
        }
    }

    fn state(value: u64) -> State {
        let mut state = State::default();
        state.put("value", &value).unwrap();
        state
    }

    fn newest(store: &StateStore) -> Option<(u64, u64)> {
        let (step, state) = store.newest(&Silent).unwrap()?;
        Some((step, state.get("value").unwrap()))
    }

    fn files(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_newest_few_are_kept_and_later_ones_than_a_new_one_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let store = StateStore::open(&folder.path().join("state"), 2, "a");
        assert_eq!(newest(&store), None);
        for step in [5, 10, 15] {
            store.write(step, &state(step)).unwrap();
        }
        assert_eq!(files(&store.directory), ["step-10.state", "step-15.state"]);
        store.write(12, &state(1)).unwrap();
        assert_eq!((newest(&store), files(&store.directory).len()), (Some((12, 1)), 2));
    }

    #[test]
    fn a_damaged_newest_falls_back_to_the_one_before_with_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let store = StateStore::open(folder.path(), 3, "a");
        store.write(5, &state(5)).unwrap();
        store.write(10, &state(10)).unwrap();
        let path = store.path(10);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 3]).unwrap();
        let lines = Lines::default();
        assert_eq!(store.newest(&lines).unwrap().unwrap().0, 5);
        let expected = format!("warning: {}: ends too early; the checkpoint of step 5 is used", path.display());
        assert_eq!(*lines.0.lock().unwrap(), [expected]);
    }

    #[test]
    fn where_every_file_is_damaged_the_warnings_say_that_the_stage_starts_over() {
        let folder = tempfile::tempdir().unwrap();
        let store = StateStore::open(folder.path(), 3, "a");
        std::fs::write(store.path(5), "querl").unwrap();
        std::fs::write(store.path(10), "").unwrap();
        let lines = Lines::default();
        assert!(store.newest(&lines).unwrap().is_none());
        let expected = [10, 5].map(|step| {
            let path = store.path(step);
            let end = "ends too early; no complete checkpoint is left, and the stage starts from the beginning";
            format!("warning: {}: {end}", path.display())
        });
        assert_eq!(*lines.0.lock().unwrap(), expected);
    }

    /// The symptom: a checkpoint that was temporarily unreadable was called damaged, and training started from the beginning.
    #[test]
    fn an_unreadable_file_is_an_error_and_no_damage() {
        let folder = tempfile::tempdir().unwrap();
        let store = StateStore::open(folder.path(), 3, "a");
        store.write(5, &state(5)).unwrap();
        std::fs::create_dir(store.path(10)).unwrap(); // what no user, root included, can read as a file
        let error = store.newest(&Silent).unwrap_err();
        assert!(matches!(&error, TrainError::Io { path, .. } if *path == store.path(10)), "{error}");
    }

    #[test]
    fn a_state_of_other_inputs_is_not_resumed() {
        let folder = tempfile::tempdir().unwrap();
        StateStore::open(folder.path(), 3, "a").write(5, &state(5)).unwrap();
        let lines = Lines::default();
        assert!(StateStore::open(folder.path(), 3, "b").newest(&lines).unwrap().is_none());
        assert!(lines.0.lock().unwrap()[0].ends_with("belongs to a training on other inputs; not resumed from it"));
    }

    #[test]
    fn a_full_disk_leaves_what_was_written_before() {
        let folder = tempfile::tempdir().unwrap();
        let store = StateStore::open(folder.path(), 1, "a");
        store.write(5, &state(5)).unwrap();
        let full = store.commit(10, |to| {
            to.write_all(b"querl state 1\n")?;
            to.flush()?;
            Err(io::ErrorKind::StorageFull.into())
        });
        let message = full.unwrap_err().to_string();
        let expected = "step-10.state: cannot be written; earlier checkpoints are complete; run the same command \
                        again to resume: no storage space";
        assert!(message.ends_with(expected), "{message}");
        assert_eq!((newest(&store), files(folder.path())), (Some((5, 5)), vec!["step-5.state".to_owned()]));
    }
}
