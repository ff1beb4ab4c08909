//! Check of the argument that is a plugin's folder.

use querl_pipeline::failure::Stop;
use std::io::ErrorKind;
use std::path::Path;

/// Remedy in the error about a missing plugin folder.
pub(super) const REMEDY: &str = "`querl plugin new NAME --kind reward --lang python` makes one";

/// Refuses a path that is not a folder.
pub(super) fn check(path: &Path) -> Result<(), Stop> {
    let problem = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => "is a file; expected a plugin's source folder",
        Err(error) if error.kind() == ErrorKind::NotFound => "there is no such folder",
        Err(error) => return Err(Stop::usage(format!("{}: cannot be read: {error}", path.display()))),
    };
    Err(Stop::usage(format!("{}: {problem}; {REMEDY}", path.display())))
}
