//! Errors of building, loading and configuring a plugin.

use querl_bundle::BundleError;
use querl_core::ports::PluginFault;
use std::path::PathBuf;

/// Why a plugin cannot be built, loaded or configured.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The plugin host could not be set up.
    #[error("the plugin host cannot start: {0}")]
    Host(String),
    /// The plugin's file or folder does not exist or cannot be read.
    #[error("plugin {}: {reason}", path.display())]
    Unreadable {
        /// Path of the plugin, as configured.
        path: PathBuf,
        /// Why it cannot be read.
        reason: String,
    },
    /// The file is not a component for this host.
    #[error("plugin {}: {reason}", path.display())]
    NotAPlugin {
        /// Path of the plugin, as configured.
        path: PathBuf,
        /// What was expected, and what the file is.
        reason: String,
    },
    /// The component could not be compiled, or must not be.
    #[error("plugin {}: {reason}", path.display())]
    Compile {
        /// Path of the plugin, as configured.
        path: PathBuf,
        /// The compiler's message, or the limit that was exceeded.
        reason: String,
    },
    /// The bundle or its plugin.toml is invalid.
    #[error("plugin {0}")]
    Bundle(#[from] BundleError),
    /// plugin.toml and the component disagree.
    #[error("plugin {}: {reason}", path.display())]
    Manifest {
        /// Path of the bundle, or of the component in the source folder.
        path: PathBuf,
        /// The value in plugin.toml and the value of the component.
        reason: String,
    },
    /// The bundle is not signed by any of the trusted keys.
    #[error("plugin {plugin}: {reason} (`plugins.trusted_keys`)")]
    Untrusted {
        /// Path of the plugin, as configured.
        plugin: String,
        /// The keys that signed the bundle, and the trusted keys.
        reason: String,
    },
    /// Source folders whose component is missing or older than its source, on a host that does not build.
    #[error("{}", not_built(paths))]
    NotBuilt {
        /// The source folders; at least one.
        paths: Vec<PathBuf>,
    },
    /// The source folder did not build.
    #[error("plugin {}: {tool} could not build it{advice}:\n{output}", path.display())]
    Build {
        /// Path of the source folder.
        path: PathBuf,
        /// The build tool: cargo, componentize-py, componentize-js.
        tool: &'static str,
        /// Output of the build tool.
        output: String,
        /// Advice for the user, as the rest of a sentence; may be empty.
        advice: String,
    },
    /// The Rust target `wasm32-wasip2`, which the build needs, is not installed.
    #[error(
        "plugin {}: the Rust target wasm32-wasip2 is not installed; run `rustup target add wasm32-wasip2`",
        path.display()
    )]
    TargetMissing {
        /// Path of the source folder.
        path: PathBuf,
    },
    /// The plugin does not have the kind that the configuration asks for.
    #[error("plugin {plugin}: it is a {actual} plugin; expected a {expected} plugin")]
    WrongKind {
        /// Name and version of the plugin.
        plugin: String,
        /// The kinds that the plugin has.
        actual: String,
        /// The kind that the configuration asks for.
        expected: &'static str,
    },
    /// The plugin does not know or does not accept a setting.
    #[error("plugin {plugin}: setting `{key}`: {message}")]
    Setting {
        /// Name and version of the plugin.
        plugin: String,
        /// Key of the setting.
        key: String,
        /// The value expected, and the value given.
        message: String,
    },
    /// The plugin broke its contract while it was loaded or configured.
    #[error(transparent)]
    Fault(#[from] PluginFault),
}

fn not_built(paths: &[PathBuf]) -> String {
    let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    match names.as_slice() {
        [name] => format!(
            "plugin {name}: its component is missing or older than its source; build it with `querl plugin build {name}`, which runs \
             code of the folder"
        ),
        names => format!(
            "plugins {}: their components are missing or older than their sources; build them with `querl plugin build {}`, which runs \
             code of the folders",
            names.join(", "),
            names.join(" ")
        ),
    }
}
