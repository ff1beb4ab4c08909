//! Atomic creation of folders: a folder is written completely or not at all.

use crate::args::usage;
use anyhow::Context;
use std::path::Path;

/// Calls `write` with a temporary folder next to `out`, and moves it to `out`, which must be new or empty.
pub(crate) fn write_folder<T>(out: &Path, write: impl FnOnce(&Path) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let problem = match out.is_file() {
        true => Some("is a file"),
        false => out.read_dir().is_ok_and(|mut entries| entries.next().is_some()).then_some("is not empty"),
    };
    if let Some(problem) = problem {
        return Err(usage(format!("{}: {problem}; name a new folder", out.display())).into());
    }
    let unwritable = || format!("{}: cannot be written", out.display());
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).with_context(unwritable)?;
    let place = if out.is_dir() { out } else { parent };
    let staging = tempfile::Builder::new().prefix(".querl-").tempdir_in(place).with_context(unwritable)?;
    let written = write(staging.path())?;
    make_readable(staging.path()).with_context(unwritable)?;
    move_to(staging.path(), out).with_context(unwritable)?;
    Ok(written)
}

/// Moves a folder. If `out` exists, its entries are moved: `out` may be the current folder, a link or a mount point, which cannot be
/// replaced.
pub(crate) fn move_to(staging: &Path, out: &Path) -> std::io::Result<()> {
    if !out.is_dir() {
        return std::fs::rename(staging, out);
    }
    for entry in staging.read_dir()? {
        let entry = entry?;
        std::fs::rename(entry.path(), out.join(entry.file_name()))?;
    }
    Ok(())
}

/// Lets all users read the folder, such as the user of a systemd service: temporary folders, and at some sites model files, are private to
/// their owner.
fn make_readable(path: &Path) -> std::io::Result<()> {
    let is_program = path.file_name().is_some_and(|name| name == "querl");
    let is_script = path.extension().is_some_and(|extension| extension == "sh");
    if path.is_dir() {
        std::fs::read_dir(path)?.try_for_each(|entry| make_readable(&entry?.path()))?;
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = if path.is_dir() || is_program || is_script { 0o755 } else { 0o644 };
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}
