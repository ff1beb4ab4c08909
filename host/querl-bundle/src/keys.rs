//! Ed25519 keys: a private one in a file that only its owner reads, and the public one as text.

use crate::error::BundleError;
use ed25519_dalek::VerifyingKey;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePrivateKey, EncodePrivateKey};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

const PREFIX: &str = "ed25519:";
/// A private key's PEM has 119 bytes; a file much larger is something else.
const LONGEST_KEY_FILE: u64 = 4096;

/// Who may have signed a bundle. Written as `ed25519:` and 64 hexadecimal digits.
#[derive(Clone, PartialEq, Eq)]
pub struct PublicKey(VerifyingKey);

/// What signs bundles. No message and no `Debug` output shows it.
pub struct SigningKey(ed25519_dalek::SigningKey);

impl PublicKey {
    /// Reads `ed25519:` and 64 hexadecimal digits, which messages say were written in `origin`.
    ///
    /// # Errors
    /// Another form, or a number that is no usable key.
    pub fn parse(text: &str, origin: &str) -> Result<Self, BundleError> {
        let refuse = |message: &str| BundleError::Key { origin: origin.to_owned(), message: message.to_owned() };
        let mut bytes = [0; 32];
        let digits = text.strip_prefix(PREFIX).filter(|digits| !digits.bytes().any(|byte| byte.is_ascii_uppercase()));
        let decoded = digits.and_then(|digits| hex::decode_to_slice(digits, &mut bytes).ok());
        decoded.ok_or_else(|| refuse("not a public key; expected `ed25519:` and 64 of 0 to 9 and a to f"))?;
        let key = VerifyingKey::from_bytes(&bytes).ok().filter(|key| !key.is_weak());
        key.map(Self).ok_or_else(|| refuse("not an ed25519 key, though it has the form of one; copy it again"))
    }

    pub(crate) fn verifying(&self) -> &VerifyingKey {
        &self.0
    }
}

impl std::fmt::Display for PublicKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{PREFIX}{}", hex::encode(self.0.as_bytes()))
    }
}

impl std::fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

impl SigningKey {
    /// A new key from the operating system's random numbers.
    ///
    /// # Errors
    /// The operating system has none to give.
    pub fn generate() -> Result<Self, BundleError> {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).map_err(|error| BundleError::Key {
            origin: "new key".to_owned(),
            message: format!("the operating system gave no random numbers: {error}"),
        })?;
        let key = Self(ed25519_dalek::SigningKey::from_bytes(&secret));
        secret.fill(0);
        Ok(key)
    }

    /// Reads a PKCS#8 PEM file.
    ///
    /// # Errors
    /// The file cannot be read, others may read it (on Unix), or it holds no ed25519 private key.
    pub fn read(path: &Path) -> Result<Self, BundleError> {
        let metadata = std::fs::metadata(path).map_err(|source| BundleError::io(path, source))?;
        let refuse = |message: String| Err(BundleError::Key { origin: path.display().to_string(), message });
        if metadata.len() > LONGEST_KEY_FILE {
            return refuse(format!("has {} bytes; a private key in PEM has about 120", metadata.len()));
        }
        if let Some(mode) = open_to_others(&metadata) {
            return refuse(format!("has mode {mode:o}, so that others may read it; run `chmod 600` on it"));
        }
        let pem = std::fs::read_to_string(path).map_err(|source| BundleError::io(path, source))?;
        match ed25519_dalek::SigningKey::from_pkcs8_pem(&pem) {
            Ok(key) => Ok(Self(key)),
            Err(_) => refuse(
                "holds no ed25519 private key in PKCS#8 PEM; make one with `querl plugin sign --new-key FILE`".into(),
            ),
        }
    }

    /// Writes the key to a new file that only its owner may read (mode 0600 on Unix).
    ///
    /// # Errors
    /// There is a file already, which is left as it is; or the file system says no.
    pub fn write_new(&self, path: &Path) -> Result<(), BundleError> {
        let pem = self.0.to_pkcs8_pem(LineEnding::LF).expect("an ed25519 key always has a PKCS#8 form");
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::AlreadyExists => BundleError::Key {
                origin: path.display().to_string(),
                message: "is there already; a key is never overwritten, choose another name".to_owned(),
            },
            _ => BundleError::io(path, source),
        })?;
        let written = file.write_all(pem.as_bytes()).and_then(|()| file.sync_all());
        written.map_err(|source| BundleError::io(path, source))
    }

    /// The public key that belongs to it.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key())
    }

    pub(crate) fn signing(&self) -> &ed25519_dalek::SigningKey {
        &self.0
    }
}

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[private key of {}]", self.public())
    }
}

/// The permission bits, where they let others than the owner in.
#[cfg(unix)]
fn open_to_others(metadata: &std::fs::Metadata) -> Option<u32> {
    let mode = std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o777;
    (mode & 0o077 != 0).then_some(mode)
}

#[cfg(not(unix))]
fn open_to_others(_: &std::fs::Metadata) -> Option<u32> {
    None
}
