//! Log lines for debugging a plugin: to the host's log in a component, to stderr in native builds such as tests. They have no effect on
//! results.

/// Writes a line of level debug.
pub fn debug(message: impl AsRef<str>) {
    write(Level::Debug, message.as_ref());
}

/// Writes a line of level info.
pub fn info(message: impl AsRef<str>) {
    write(Level::Info, message.as_ref());
}

/// Writes a line of level warn.
pub fn warn(message: impl AsRef<str>) {
    write(Level::Warn, message.as_ref());
}

/// Writes a line of level error.
pub fn error(message: impl AsRef<str>) {
    write(Level::Error, message.as_ref());
}

#[derive(Debug, Clone, Copy)]
enum Level {
    Debug,
    Info,
    Warn,
    Error,
}

#[cfg(not(target_arch = "wasm32"))]
fn write(level: Level, message: &str) {
    let line = format!("{}: {message}", format!("{level:?}").to_lowercase());
    match KEPT.lock().unwrap_or_else(std::sync::PoisonError::into_inner).as_mut() {
        Some(kept) => kept.push(line),
        None => eprintln!("{line}"),
    }
}

/// Stored lines since [`keep`]; `None` if lines are written to stderr.
#[cfg(not(target_arch = "wasm32"))]
static KEPT: std::sync::Mutex<Option<Vec<String>>> = std::sync::Mutex::new(None);

/// Stores further lines for [`taken`] instead of writing them to stderr.
#[cfg(all(feature = "dev", not(target_arch = "wasm32")))]
pub(crate) fn keep() {
    *KEPT.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(Vec::new());
}

/// Removes and returns the stored lines.
#[cfg(all(feature = "dev", not(target_arch = "wasm32")))]
pub(crate) fn taken() -> Vec<String> {
    KEPT.lock().unwrap_or_else(std::sync::PoisonError::into_inner).as_mut().map(std::mem::take).unwrap_or_default()
}

#[cfg(target_arch = "wasm32")]
fn write(level: Level, message: &str) {
    use crate::__guest::imports::querl::plugin::log;
    let level = match level {
        Level::Debug => log::Level::Debug,
        Level::Info => log::Level::Info,
        Level::Warn => log::Level::Warn,
        Level::Error => log::Level::Error,
    };
    log::log(level, message);
}
