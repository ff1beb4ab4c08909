//! References to plugins in registries: `HOST[:PORT]/REPO[:VERSION]`.

use super::client::RegistryError;
use oci_client::Reference;
use semver::Version;
use std::net::{IpAddr, Ipv6Addr};

const EXPECTED: &str = "is not a reference to a registry; expected HOST[:PORT]/REPO[:VERSION], such as registry.example.com/querl/reward-brevity:0.1.0";
/// Replaces `+`, which a tag must not contain.
const PLUS: &str = "_";
/// A bundle's tag is its component's tag with this suffix.
const BUNDLE_ENDING: &str = ".querl";

/// Reference to a plugin in an OCI registry: `HOST[:PORT]/REPO[:VERSION]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryReference {
    host: String,
    repository: String,
    version: Option<Version>,
}

impl RegistryReference {
    /// Reads `HOST[:PORT]/REPO[:VERSION]`; an IPv6 address is written in brackets.
    ///
    /// # Errors
    /// The text has another form (the host is required), or the version is not a semantic version.
    pub fn parse(text: &str) -> Result<Self, RegistryError> {
        let refuse = |message: &str| RegistryError::RegistryReference {
            text: text.escape_debug().to_string(),
            message: message.into(),
        };
        if text.contains("://") {
            return Err(refuse("begins with a protocol; leave it out: HOST[:PORT]/REPO[:VERSION]"));
        }
        let (host, rest) = text.split_once('/').ok_or_else(|| refuse(EXPECTED))?;
        let (repository, version) = match rest.split_once(':') {
            Some((repository, version)) => (repository, Some(version)),
            None => (rest, None),
        };
        // Checks the repository with the library's grammar, which requires a host.
        let parsed = Reference::try_from(format!("localhost/{repository}")).ok();
        let fits = parsed.is_some_and(|reference| reference.repository() == repository && reference.digest().is_none());
        if !is_host(host) || !fits {
            return Err(refuse(EXPECTED));
        }
        let version = version.map(Version::parse).transpose();
        let version = version.map_err(|_| refuse("has a version that is not semantic, such as 0.1.0"))?;
        Ok(Self { host: host.to_owned(), repository: repository.to_owned(), version })
    }

    /// Host of the registry, with its port if there is one.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The repository in the registry.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Checks that the last part of the repository is the plugin's id: a repository holds one plugin.
    pub(crate) fn check_id(&self, id: &str) -> Result<(), String> {
        let (folder, last) = self.repository.rsplit_once('/').unwrap_or(("", &self.repository));
        if last == id {
            return Ok(());
        }
        let slash = if folder.is_empty() { "" } else { "/" };
        Err(format!("the plugin is `{id}`, and its repository ends with that: {}/{folder}{slash}{id}", self.host))
    }

    /// The version, if the reference has one.
    pub fn version(&self) -> Option<&Version> {
        self.version.as_ref()
    }

    /// The same reference with this version.
    pub fn with_version(&self, version: Version) -> Self {
        Self { version: Some(version), ..self.clone() }
    }

    /// True if the host is this machine: `localhost` or a loopback address.
    pub(crate) fn is_loopback(&self) -> bool {
        let name = match self.host.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or_default(),
            None => self.host.split(':').next().unwrap_or_default(),
        };
        name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    /// OCI reference of the component of `version`.
    pub(crate) fn component(&self, version: &Version) -> Reference {
        self.tagged(component_tag(version))
    }

    /// OCI reference of the bundle of `version`.
    pub(crate) fn bundle(&self, version: &Version) -> Reference {
        self.tagged(component_tag(version) + BUNDLE_ENDING)
    }

    /// OCI reference of a tag of the repository.
    pub(crate) fn tagged(&self, tag: String) -> Reference {
        Reference::with_tag(self.host.clone(), self.repository.clone(), tag)
    }
}

impl std::fmt::Display for RegistryReference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.host, self.repository)?;
        match &self.version {
            Some(version) => write!(f, ":{version}"),
            None => Ok(()),
        }
    }
}

fn component_tag(version: &Version) -> String {
    version.to_string().replace('+', PLUS)
}

/// The version whose bundle has this tag; `None` if it is not the tag of a bundle.
pub(crate) fn version_of_bundle(tag: &str) -> Option<Version> {
    Version::parse(&tag.strip_suffix(BUNDLE_ENDING)?.replacen(PLUS, "+", 1)).ok()
}

/// True if the tag of the component of `version` ends with `.querl`, as the tag of a bundle does.
pub(crate) fn is_ambiguous(version: &Version) -> bool {
    component_tag(version).ends_with(BUNDLE_ENDING)
}

/// A host name has a dot or a port, or is `localhost` or an address, unlike the first part of a repository.
fn is_host(text: &str) -> bool {
    let (name, port) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, port)) if address.parse::<Ipv6Addr>().is_ok() => {
                (None, port.strip_prefix(':').or(empty(port)))
            }
            _ => return false,
        },
        None => match text.split_once(':') {
            Some((name, port)) => (Some(name), Some(port)),
            None => (Some(text), Some("")),
        },
    };
    let Some(port) = port else { return false };
    let is_port = port.is_empty() && !text.ends_with(':') || port.parse::<u16>().is_ok_and(|port| port > 0);
    let is_label = |label: &str| {
        let inside = |c: char| c.is_ascii_alphanumeric() || c == '-';
        !label.is_empty() && label.chars().all(inside) && !label.starts_with('-') && !label.ends_with('-')
    };
    let is_name = |name: &str| name.split('.').all(is_label) && (text.contains(['.', ':']) || name == "localhost");
    is_port && name.is_none_or(is_name)
}

fn empty(text: &str) -> Option<&str> {
    text.is_empty().then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_written() {
        for (text, host, repository, version) in [
            ("registry.example.com/reward", "registry.example.com", "reward", None),
            ("localhost/a", "localhost", "a", None),
            ("localhost:5000/team/a_b/c-d:0.1.0", "localhost:5000", "team/a_b/c-d", Some("0.1.0")),
            ("[::1]:5000/a:1.0.0-rc.1+b", "[::1]:5000", "a", Some("1.0.0-rc.1+b")),
            ("[::1]/a", "[::1]", "a", None),
        ] {
            let location = RegistryReference::parse(text).unwrap();
            assert_eq!((location.host(), location.repository()), (host, repository));
            assert_eq!(location.version().map(Version::to_string).as_deref(), version);
            assert_eq!(location.to_string(), text);
        }
    }

    #[test]
    fn other_texts_are_refused_with_the_form() {
        for text in [
            "",
            "reward",
            "reward:0.1.0",
            "team/reward",
            "/reward",
            "host.com/",
            "host.com/Reward",
            "host.com/../x",
            "host.com:0/a",
            "host.com:99999/a",
            "host.com:/a",
            "[::1/a",
            "[::x]/a",
            "-host.com/a",
            "host..com/a",
            "host.com/a@sha256:00",
            "user@host.com/a",
            "host.com/a b",
        ] {
            let error = RegistryReference::parse(text).unwrap_err().to_string();
            assert!(error.contains("expected HOST[:PORT]/REPO[:VERSION]"), "{text}: {error}");
        }
        let error = RegistryReference::parse("https://host.com/a").unwrap_err().to_string();
        assert_eq!(error, "`https://host.com/a` begins with a protocol; leave it out: HOST[:PORT]/REPO[:VERSION]");
        for text in ["host.com/a:latest", "host.com/a:1.0", "host.com/a:"] {
            let error = RegistryReference::parse(text).unwrap_err().to_string();
            assert_eq!(error, format!("`{text}` has a version that is not semantic, such as 0.1.0"));
        }
    }

    #[test]
    fn last_part_of_a_repository_is_the_plugins_id() {
        let check = |text: &str| RegistryReference::parse(text).unwrap().check_id("reward-brevity");
        check("localhost/reward-brevity").unwrap();
        check("localhost/team/reward-brevity:0.1.0").unwrap();
        for (text, right) in [
            ("localhost/reward", "localhost/reward-brevity"),
            ("localhost/reward-brevity/x", "localhost/reward-brevity/reward-brevity"),
            ("localhost/a/b/reward-brevity2:0.1.0", "localhost/a/b/reward-brevity"),
        ] {
            let expected = format!("the plugin is `reward-brevity`, and its repository ends with that: {right}");
            assert_eq!(check(text).unwrap_err(), expected);
        }
    }

    #[test]
    fn loopback_is_this_machine_alone() {
        for (host, expected) in [
            ("localhost", true),
            ("127.0.0.1:5000", true),
            ("127.8.9.1", true),
            ("[::1]:5000", true),
            ("localhost.example.com", false),
            ("127.example.com", false),
            ("10.0.0.1:5000", false),
            ("[::2]", false),
        ] {
            assert_eq!(RegistryReference::parse(&format!("{host}/a")).unwrap().is_loopback(), expected, "{host}");
        }
    }

    #[test]
    fn versions_are_found_again_in_their_tags() {
        let location = RegistryReference::parse("localhost/a").unwrap();
        for text in ["0.1.0", "1.0.0-rc.1", "1.0.0-rc.1+build.7"] {
            let version = Version::parse(text).unwrap();
            let tag = location.bundle(&version).tag().unwrap().to_owned();
            assert_eq!(version_of_bundle(&tag), Some(version.clone()), "{tag}");
            assert_eq!(location.component(&version).tag().map(version_of_bundle), Some(None));
            assert!(!is_ambiguous(&version));
        }
        assert!(is_ambiguous(&Version::parse("1.0.0-x.querl").unwrap()));
    }
}
