//! Where things are kept that can be made again.

use std::path::PathBuf;

/// The user's cache folder: `$QUERL_CACHE_DIR`, `$XDG_CACHE_HOME/querl` or `~/.cache/querl`; `None` where none of these is set.
pub fn user_cache_folder() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let in_home = || Some(folder("HOME")?.join(".cache/querl"));
    folder("QUERL_CACHE_DIR").or_else(|| folder("XDG_CACHE_HOME").map(|base| base.join("querl"))).or_else(in_home)
}
