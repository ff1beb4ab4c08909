//! The versions of the contract that this host runs, and what a component of each may import.

use querl_bundle::CONTRACTS;
use wasmtime::Engine;
use wasmtime::component::types::{ComponentInstance, ComponentItem};

/// Prefix of the names of the contract's interfaces; interface name and version follow.
pub(crate) const PREFIX: &str = "querl:plugin/";

/// A series of compatible versions of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Series {
    V0_1,
    V0_2,
}

impl Series {
    /// All series, newest first.
    pub(crate) const ALL: [Self; 2] = [Self::V0_2, Self::V0_1];

    /// The series that a version belongs to; `None` if this host does not run it.
    pub(crate) fn of(version: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|series| version.starts_with(&series.prefix()))
    }

    /// The version of the contract that this host implements for the series: `0.2.0`.
    pub(crate) fn version(self) -> String {
        CONTRACTS[self as usize].to_string()
    }

    /// `0.2.`
    fn prefix(self) -> String {
        let version = &CONTRACTS[self as usize];
        format!("{}.{}.", version.major, version.minor)
    }

    /// Functions of an interface that a component may import.
    fn functions(self, interface: &str) -> &'static [&'static str] {
        match (interface, self) {
            ("settings", _) => &["get"],
            ("log", _) => &["log"],
            ("style-model", _) => &["classify"],
            ("tokens", Self::V0_2) => &["count", "split"],
            ("words", Self::V0_2) => &["segment"],
            ("similarity", Self::V0_2) => &["embed"],
            ("judge", Self::V0_2) => &["ask"],
            _ => &[],
        }
    }

    /// Checks that this host has the functions that a component of this series imports from the interface `name`, which begins
    /// with [`PREFIX`]. Returns the interface without prefix and version.
    pub(crate) fn check_import<'n>(
        self,
        engine: &Engine,
        name: &'n str,
        wanted: &ComponentInstance,
    ) -> Result<&'n str, String> {
        let Some((interface, version)) = name[PREFIX.len()..].split_once('@') else {
            return Err(format!("it imports `{name}` without a version"));
        };
        match Self::of(version) {
            None => return Err(other_version(version)),
            Some(series) if series != self => {
                let ours = self.prefix();
                return Err(format!(
                    "it imports `{name}` and exports `info` of contract {ours}x; build all for one version"
                ));
            }
            Some(_) => {}
        }
        let is_function = |item: &ComponentItem| matches!(item, ComponentItem::ComponentFunc(_));
        let mut functions =
            wanted.exports(engine).filter(|(_, item)| is_function(&item.ty)).map(|(function, _)| function);
        let offered = self.functions(interface);
        match functions.find(|function| !offered.contains(function)) {
            None => Ok(interface),
            Some(function) => Err(format!(
                "it calls `{function}` of `{name}`, which this host, of contract {0}, does not offer; use a newer querl, or \
                 build the plugin for contract {0}",
                self.version()
            )),
        }
    }
}

/// The error message for a component of a contract version that this host does not run.
pub(crate) fn other_version(version: &str) -> String {
    let ours = CONTRACTS.map(|ours| format!("{}.{}.x", ours.major, ours.minor)).join(" and ");
    format!("it was built for version {version} of the plugin contract; this host runs {ours}")
}
