//! Cache of compiled code on disk, so that a plugin is compiled once.
//!
//! Compiled code is native code: who can write it can do what the host can. Therefore only this host writes it, under a key of the
//! component's bytes and all engine settings that shape code, in a folder that only its user can write or replace; a file that is
//! incomplete, or that others can write, is not used. Files that were used longest ago are removed above [`MAX_BYTES`].

use crate::compile;
use crate::compile::{CompileError, Compiler};
use crate::engine::MemoryReservation;
use querl_core::fsx::{digest_hex, io_problem};
use sha2::{Digest, Sha256};
use std::hash::{Hash, Hasher};
use std::io;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use wasmtime::Engine;
use wasmtime::component::Component;

const DIGEST_BYTES: u64 = 32;

const PIECE_BYTES: usize = 256 << 10;

/// Whether a host may write to the cache of compiled plugins.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CacheAccess {
    /// Reads compiled plugins from the cache and adds missing ones.
    #[default]
    ReadWrite,
    /// Reads compiled plugins from the cache; creates and changes no files.
    Read,
}

/// The cache of compiled components: a folder, or none, in which case every component is compiled each time it is loaded.
#[derive(Debug)]
pub(crate) struct CompiledCache {
    folder: Option<PathBuf>,
    access: CacheAccess,
    engine_key: String,
    /// How the engine reserves address space for the memories of guests, which decides how components are compiled.
    pub(crate) reservation: MemoryReservation,
}

impl CompiledCache {
    /// Opens the cache in `base/compiled`. A folder that cannot be used is a warning; components are then compiled each time.
    pub(crate) fn open(base: Option<PathBuf>, engine: &Engine, access: CacheAccess) -> Self {
        let usable = |folder: PathBuf| match private_folder(&folder, access) {
            Ok(()) => Some(folder),
            Err(error) if access == CacheAccess::Read && error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                tracing::warn!("compiled plugins are not kept: {}: {error}", folder.display());
                None
            }
        };
        let folder = base.map(|base| base.join("compiled")).and_then(usable);
        Self { folder, access, engine_key: engine_key(engine), reservation: MemoryReservation::default() }
    }

    /// The component compiled for `engine`, from the cache if possible.
    pub(crate) fn component(
        &self,
        engine: &Engine,
        compiler: &Compiler,
        timeout_ms: u64,
        bytes: &[u8],
        digest: &ComponentDigest,
    ) -> Result<Component, CompileError> {
        let name = format!("{}-{}", digest.as_str(), self.engine_key);
        let kept = self.folder.as_ref().map(|folder| folder.join(&name));
        if let Some((path, component)) = kept.as_ref().and_then(|path| Some((path, found(engine, path)?))) {
            if self.access == CacheAccess::ReadWrite {
                touch(path);
            }
            return Ok(component);
        }
        let writable = self.folder.as_deref().filter(|_| self.access == CacheAccess::ReadWrite);
        match (compiler, kept.filter(|_| writable.is_some())) {
            (Compiler::InProcessWithoutLimits, kept) => {
                let code = compile::in_process(engine, bytes)?;
                if let Some(path) = kept {
                    let written = write(&path, &code);
                    written.unwrap_or_else(|error| tracing::warn!("{}: cannot be written: {error}", path.display()));
                    self.prune(&path);
                }
                // SAFETY: this engine has just compiled the code.
                unsafe { Component::deserialize(engine, code) }.map_err(|error| too_large(&error))
            }
            (Compiler::Child(program, args), kept) => {
                let folder = compile::private_temporary(writable)?;
                let output = folder.path().join(&name);
                compile::in_child(program, args, bytes, &output, (timeout_ms, self.reservation))?;
                if !is_whole(&output) {
                    return Err(CompileError(format!("`{}` wrote no compiled code", program.display())));
                }
                let renamed = kept.filter(|path| std::fs::rename(&output, path).is_ok());
                renamed.iter().for_each(|path| self.prune(path));
                load(engine, &renamed.unwrap_or(output)).map_err(|error| too_large(&error))
            }
        }
    }

    fn prune(&self, newest: &Path) {
        self.folder.iter().for_each(|folder| prune(folder, newest, MAX_BYTES));
    }
}

fn engine_key(engine: &Engine) -> String {
    struct Sha(Sha256);
    impl Hasher for Sha {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
        fn finish(&self) -> u64 {
            let digest = self.0.clone().finalize();
            digest.iter().take(8).fold(0, |key, byte| (key << 8) | u64::from(*byte))
        }
    }
    let mut hasher = Sha(Sha256::new());
    engine.precompile_compatibility_hash().hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// A digest over file name and code, so that a renamed file is not accepted as another component's code.
fn seal(path: &Path) -> Sha256 {
    let mut hasher = Sha256::new();
    hasher.update(path.file_name().unwrap_or_default().as_encoded_bytes());
    hasher.update([0]);
    hasher
}

/// Writes compiled code, followed by the digest of file name and code with which a later host checks it. The file is mapped into
/// memory as it is.
pub(crate) fn write(path: &Path, code: &[u8]) -> io::Result<()> {
    querl_core::fsx::write_atomic_with(path, |file| {
        file.write_all(code)?;
        file.write_all(&seal(path).chain_update(code).finalize())
    })
}

/// True if the file exists, only its owner can write to it, and its digest matches.
fn is_whole(path: &Path) -> bool {
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return false,
        Err(error) => {
            tracing::warn!("{}: not used: {error}", path.display());
            return false;
        }
    };
    if !metadata.is_file() || !ours_alone(&metadata) {
        tracing::warn!("{}: not used: not a file that only its owner can write", path.display());
        return false;
    }
    match sealed(path, metadata.len()) {
        Ok(true) => true,
        Ok(false) => {
            tracing::warn!("{}: not used: damaged", path.display());
            false
        }
        Err(error) => {
            tracing::warn!("{}: not used: {}", path.display(), io_problem(&error));
            false
        }
    }
}

fn sealed(path: &Path, n_bytes: u64) -> io::Result<bool> {
    let Some(n_code_bytes) = n_bytes.checked_sub(DIGEST_BYTES) else { return Ok(false) };
    let (mut file, mut hasher) = (std::fs::File::open(path)?, seal(path));
    let mut piece = vec![0; PIECE_BYTES];
    let mut code = (&mut file).take(n_code_bytes);
    loop {
        match code.read(&mut piece)? {
            0 => break,
            n => hasher.update(&piece[..n]),
        }
    }
    let mut written = Vec::new();
    file.take(DIGEST_BYTES + 1).read_to_end(&mut written)?;
    Ok(hasher.finalize().as_slice() == written)
}

/// The cached code; `None` if the file is missing or cannot be used, and the component must be compiled again.
fn found(engine: &Engine, path: &Path) -> Option<Component> {
    if !is_whole(path) {
        return None;
    }
    match load(engine, path) {
        Ok(component) => Some(component),
        Err(error) => {
            tracing::warn!("{}: not used: {error:#}", path.display());
            None
        }
    }
}

fn load(engine: &Engine, path: &Path) -> wasmtime::Result<Component> {
    // SAFETY: the file is in a folder that only this user can write or replace, and its seal matches. Its name has the digest of the
    // component and the hash of wasmtime's version and the engine's settings, with which a host compiled it; nothing else is written there, and
    // files are replaced, never modified.
    unsafe { Component::deserialize_file(engine, path) }
}

/// The error for compiled code whose memories, tables or modules exceed those of the pool.
fn too_large(error: &wasmtime::Error) -> CompileError {
    CompileError(format!("it exceeds a limit of this host, such as `plugins.limits.memory_bytes`: {error:#}"))
}

/// Creates the folder if permitted, and checks that it belongs to this user only.
fn private_folder(folder: &Path, access: CacheAccess) -> io::Result<()> {
    if access == CacheAccess::ReadWrite {
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(folder)?;
    }
    let metadata = std::fs::symlink_metadata(folder)?;
    if !metadata.is_dir() || !ours_alone(&metadata) {
        return Err(io::Error::other("not a folder that only its owner can write"));
    }
    // A user who can write to a parent folder can replace this folder between check and use.
    for above in folder.canonicalize()?.ancestors().skip(1) {
        if !is_safe_above(&std::fs::symlink_metadata(above)?) {
            return Err(io::Error::other(format!("others than its owner can write {}", above.display())));
        }
    }
    Ok(())
}

/// True for a folder that is owned by this user or root and writable by nobody else; or that has the sticky bit, such as /tmp.
#[cfg(unix)]
fn is_safe_above(metadata: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    const STICKY: u32 = 0o1000;
    let owner = metadata.uid();
    let is_trusted = owner == rustix::process::geteuid().as_raw() || owner == 0;
    is_trusted && (metadata.mode() & 0o022 == 0 || metadata.mode() & STICKY != 0)
}

#[cfg(not(unix))]
fn is_safe_above(_: &std::fs::Metadata) -> bool {
    true
}

#[cfg(unix)]
fn ours_alone(metadata: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    metadata.uid() == rustix::process::geteuid().as_raw() && metadata.mode() & 0o022 == 0
}

#[cfg(not(unix))]
fn ours_alone(_: &std::fs::Metadata) -> bool {
    true
}

/// Lower-case hexadecimal SHA-256 of a component's bytes. Computed from the bytes, never read from a file: otherwise the code of
/// one component could be cached, and later run, as another's.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ComponentDigest(String);

impl ComponentDigest {
    pub(crate) fn of(component: &[u8]) -> Self {
        Self(digest_hex(component))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Maximum size of all files of the cache together, about 45 Python components.
pub(crate) const MAX_BYTES: u64 = 2 << 30;

/// A compiler removes its temporary folder; an older one was left by a host that was killed.
const MAX_COMPILE_AGE: Duration = Duration::from_hours(24);

/// Sets the modification time of a file of the cache to now, so that the files used last are removed last. Failure is ignored.
pub(crate) fn touch(path: &Path) {
    let _ = std::fs::File::options().append(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
}

/// Removes files from the cache, those used longest ago first and never `newest`, until the rest has at most `max_bytes`. A host
/// that has mapped a removed file keeps its mapping.
pub(crate) fn prune(folder: &Path, newest: &Path, max_bytes: u64) {
    if let Err(error) = try_prune(folder, newest, max_bytes) {
        tracing::debug!("{}: not pruned: {error}", folder.display());
    }
}

fn try_prune(folder: &Path, newest: &Path, max_bytes: u64) -> io::Result<()> {
    let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(metadata) = entry.metadata() else { continue };
        let modified = metadata.modified()?;
        if metadata.is_file() {
            files.push((modified, metadata.len(), entry.path()));
        } else if metadata.is_dir() && modified.elapsed().is_ok_and(|age| age > MAX_COMPILE_AGE) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    files.sort();
    let mut n_bytes: u64 = files.iter().map(|(_, n_bytes, _)| n_bytes).sum();
    for (_, size, path) in files.into_iter().filter(|(_, _, path)| path != newest) {
        if n_bytes <= max_bytes {
            break;
        }
        if std::fs::remove_file(&path).is_ok() {
            n_bytes -= size;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn files_used_longest_ago_go_first_and_the_newest_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for (name, age_s) in [("a", 30), ("b", 20), ("c", 10), ("new", 40)] {
            std::fs::write(path(name), [0; 100]).unwrap();
            let modified = SystemTime::now() - Duration::from_secs(age_s);
            std::fs::File::options().append(true).open(path(name)).unwrap().set_modified(modified).unwrap();
        }
        prune(folder.path(), &path("new"), 400);
        assert_eq!(names(folder.path()), ["a", "b", "c", "new"]);
        touch(&path("a"));
        prune(folder.path(), &path("new"), 250);
        assert_eq!(names(folder.path()), ["a", "new"]);
        prune(folder.path(), &path("new"), 0);
        assert_eq!(names(folder.path()), ["new"]);
    }

    #[test]
    fn folder_of_a_host_that_was_killed_goes_and_one_at_work_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["compiling-old", "compiling-now"] {
            std::fs::create_dir(path(name)).unwrap();
            std::fs::write(path(name).join("component.wasm"), "x").unwrap();
        }
        let long_ago = SystemTime::now() - MAX_COMPILE_AGE - Duration::from_secs(60);
        std::fs::File::open(path("compiling-old")).unwrap().set_modified(long_ago).unwrap();
        prune(folder.path(), &path("none"), 0);
        assert_eq!(names(folder.path()), ["compiling-now"]);
    }
}
