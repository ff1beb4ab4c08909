//! Errors of building, loading and configuring a plugin.

use querl_bundle::BundleError;
use querl_core::ports::PluginFault;
use std::path::PathBuf;

/// Why a plugin cannot be built, loaded or configured.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The host itself could not be set up.
    #[error("the plugin host cannot start: {0}")]
    Host(String),
    /// No such file, or not readable.
    #[error("plugin {}: {reason}", path.display())]
    Unreadable {
        /// As configured.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The file is not a component for this host.
    #[error("plugin {}: {reason}", path.display())]
    NotAPlugin {
        /// As configured.
        path: PathBuf,
        /// Expected and got.
        reason: String,
    },
    /// It was not, or could not be, compiled.
    #[error("plugin {}: {reason}", path.display())]
    Compile {
        /// As configured.
        path: PathBuf,
        /// The compiler's message, or the limit that it exceeded.
        reason: String,
    },
    /// A bundle or a plugin.toml is wrong.
    #[error("plugin {0}")]
    Bundle(#[from] BundleError),
    /// plugin.toml and the component differ.
    #[error("plugin {}: {reason}", path.display())]
    Manifest {
        /// The bundle, or the component of the folder.
        path: PathBuf,
        /// Both values.
        reason: String,
    },
    /// Not signed by any of the trusted keys.
    #[error("plugin {plugin}: {reason} (`plugins.trusted_keys`)")]
    Untrusted {
        /// As configured.
        plugin: String,
        /// The signers, and the keys that were expected.
        reason: String,
    },
    /// Source folders that would have to be built first, which this host does not do.
    #[error("{}", not_built(paths))]
    NotBuilt {
        /// At least one folder.
        paths: Vec<PathBuf>,
    },
    /// The source folder did not build.
    #[error("plugin {}: {tool} could not build it{advice}:\n{output}", path.display())]
    Build {
        /// The folder.
        path: PathBuf,
        /// The build tool: cargo, componentize-py, componentize-js.
        tool: &'static str,
        /// Its output.
        output: String,
        /// What to do, as the rest of a sentence; may be empty.
        advice: String,
    },
    /// Building needs a target that is not installed.
    #[error(
        "plugin {}: the Rust target wasm32-wasip2 is not installed; run `rustup target add wasm32-wasip2`",
        path.display()
    )]
    TargetMissing {
        /// The folder.
        path: PathBuf,
    },
    /// The plugin is of another kind.
    #[error("plugin {plugin}: it is a {actual} plugin; expected a {expected} plugin")]
    WrongKind {
        /// Name and version.
        plugin: String,
        /// The kinds it has.
        actual: String,
        /// The kind that the configuration asks for.
        expected: &'static str,
    },
    /// The plugin refused a setting, or does not know it.
    #[error("plugin {plugin}: setting `{key}`: {message}")]
    Setting {
        /// Name and version.
        plugin: String,
        /// The key.
        key: String,
        /// Expected and got.
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
