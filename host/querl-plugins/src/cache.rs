//! Compiled code on disk, so that a plugin is compiled once.
//!
//! Compiled code is native code: whoever can write it can do what the host can. Hence: only this host writes it, keyed by the
//! component's bytes and everything of the engine that shapes code, in a folder that only its user can write; a file that is not
//! whole, or not ours alone, is not used.

use sha2::{Digest, Sha256};
use std::hash::{Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use wasmtime::Engine;
use wasmtime::component::Component;

/// Length of the digest at the start of a file.
const DIGEST_BYTES: usize = 32;

/// A folder of compiled components; without a folder, everything is compiled anew.
#[derive(Debug)]
pub(crate) struct CompiledCache {
    folder: Option<PathBuf>,
    engine_key: String,
}

impl CompiledCache {
    /// A cache in `base/compiled`. A folder that cannot be used is a warning, not an error.
    pub(crate) fn open(base: Option<PathBuf>, engine: &Engine) -> Self {
        let usable = |folder: PathBuf| match private_folder(&folder) {
            Ok(()) => Some(folder),
            Err(error) => {
                tracing::warn!("compiled plugins are not kept: {}: {error}", folder.display());
                None
            }
        };
        Self { folder: base.map(|base| base.join("compiled")).and_then(usable), engine_key: engine_key(engine) }
    }

    /// The component compiled for `engine`, from the cache where it is there.
    ///
    /// # Errors
    /// `bytes` are not a component that this engine can compile.
    pub(crate) fn component(&self, engine: &Engine, bytes: &[u8], digest: &str) -> wasmtime::Result<Component> {
        let path = self.folder.as_ref().map(|folder| folder.join(format!("{digest}-{}", self.engine_key)));
        if let Some(component) = path.as_ref().and_then(|path| read(engine, path)) {
            return Ok(component);
        }
        let component = Component::from_binary(engine, bytes)?;
        if let Some(path) = path {
            let kept = component.serialize().map_err(io::Error::other).and_then(|code| write(&path, &code));
            kept.unwrap_or_else(|error| tracing::warn!("{}: cannot be written: {error}", path.display()));
        }
        Ok(component)
    }
}

/// The user's cache folder: `$QUERL_CACHE_DIR`, `$XDG_CACHE_HOME/querl` or `~/.cache/querl`.
pub(crate) fn user_folder() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let in_home = || Some(folder("HOME")?.join(".cache/querl"));
    folder("QUERL_CACHE_DIR").or_else(|| folder("XDG_CACHE_HOME").map(|base| base.join("querl"))).or_else(in_home)
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

/// Over the file's name too: code that lies under the name of another component is not that component's.
fn sealed(path: &Path, code: &[u8]) -> [u8; DIGEST_BYTES] {
    let mut hasher = Sha256::new();
    hasher.update(path.file_name().unwrap_or_default().as_encoded_bytes());
    hasher.update([0]);
    hasher.update(code);
    hasher.finalize().into()
}

fn write(path: &Path, code: &[u8]) -> io::Result<()> {
    let mut file = Vec::with_capacity(DIGEST_BYTES + code.len());
    file.extend_from_slice(&sealed(path, code));
    file.extend_from_slice(code);
    querl_core::fsx::write_atomic(path, &file)
}

fn read(engine: &Engine, path: &Path) -> Option<Component> {
    let metadata = std::fs::symlink_metadata(path).ok()?;
    if !metadata.is_file() || !ours_alone(&metadata) {
        tracing::warn!("{}: not used: not a file that only its owner can write", path.display());
        return None;
    }
    let file = std::fs::read(path).ok()?;
    let whole = file.split_at_checked(DIGEST_BYTES).filter(|(digest, code)| sealed(path, code) == *digest);
    let Some((_, code)) = whole else {
        tracing::warn!("{}: not used: damaged", path.display());
        return None;
    };
    // SAFETY: the file lies in a folder that only this user can write, is whole, and its name says that this host compiled
    // it with an engine of the same settings; nothing else is ever put there.
    unsafe { Component::deserialize(engine, code) }.ok()
}

/// Makes the folder, or checks that one that is there belongs to the user alone.
fn private_folder(folder: &Path) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)?;
    let metadata = std::fs::symlink_metadata(folder)?;
    if metadata.is_dir() && ours_alone(&metadata) {
        return Ok(());
    }
    Err(io::Error::other("not a folder that only its owner can write"))
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
