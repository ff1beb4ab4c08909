//! Keys, and signatures of bundles: ed25519 over the digest.

use crate::archive::{self, Damage, names};
use crate::bundle::Bundle;
use crate::error::BundleError;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePrivateKey, DecodePublicKey, EncodePrivateKey, EncodePublicKey, KeypairBytes};
use ed25519_dalek::{Signature, Signer, VerifyingKey};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

const MESSAGE_TITLE: &str = "querl bundle signature 1";
/// Maximum number of signatures.
const MOST_SIGNATURES: usize = 16;

/// A valid signature of the bundle that contains it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleSignature {
    key: PublicKey,
    signature: Signature,
}

impl BundleSignature {
    /// The signer's key.
    pub fn key(&self) -> &PublicKey {
        &self.key
    }
}

/// Adds a signature of `key` to the bundle `bytes`; returns the same bytes if `key` has already signed the bundle.
///
/// # Errors
/// As [`Bundle::from_bytes`]; or there are 16 signatures already.
pub fn sign(bytes: &[u8], key: &SigningKey) -> Result<Vec<u8>, BundleError> {
    let bundle = Bundle::from_bytes(bytes, "the bundle to sign")?;
    let mut signatures = bundle.signatures().to_vec();
    let public = key.public();
    if signatures.iter().any(|signature| signature.key == public) {
        return Ok(bytes.to_vec());
    }
    if signatures.len() == MOST_SIGNATURES {
        let message = format!("has {MOST_SIGNATURES} signatures, which is the most a bundle takes");
        return Err(bundle.damage(Damage::new(names::SIGNATURES, message)));
    }
    let signature = key.key.sign(message(bundle.digest()).as_bytes());
    signatures.push(BundleSignature { key: public, signature });
    signatures.sort_by_key(|signature| signature.key.to_string());
    let mut files = bundle.into_files();
    files.insert(names::SIGNATURES.to_owned(), text(&signatures).into_bytes());
    archive::write(&files).map_err(|source| BundleError::Archive {
        origin: "the signed bundle".to_owned(),
        part: "compressed stream".to_owned(),
        message: source.to_string(),
    })
}

/// The signatures in an entry's content, each checked against the bundle's digest.
pub(crate) fn read(content: &[u8], digest: &str) -> Result<Vec<BundleSignature>, Damage> {
    let refuse = |message: String| Damage::new(names::SIGNATURES, message);
    let form = || refuse("is not a list of signatures, one `ed25519:KEY SIGNATURE` a line".to_owned());
    let text = std::str::from_utf8(content).map_err(|_| form())?;
    let mut signatures: Vec<BundleSignature> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if index == MOST_SIGNATURES {
            return Err(refuse(format!("has more than {MOST_SIGNATURES} signatures")));
        }
        let (key, signature) = line.split_once(' ').ok_or_else(form)?;
        let key = PublicKey::parse(key, "").map_err(|_| refuse(format!("has no public key in line {}", index + 1)))?;
        let mut bytes = [0; 64];
        hex::decode_to_slice(signature, &mut bytes).map_err(|_| form())?;
        let signature = Signature::from_bytes(&bytes);
        key.0.verify_strict(message(digest).as_bytes(), &signature).map_err(|_| {
            refuse(format!(
                "has a signature in line {} that does not fit the bundle; one of the two was changed",
                index + 1
            ))
        })?;
        signatures.push(BundleSignature { key, signature });
    }
    // Requires the canonical form (sorted, each key once), so that every changed byte is detected.
    let is_sorted = signatures.is_sorted_by(|one, other| one.key.to_string() < other.key.to_string());
    match !signatures.is_empty() && is_sorted && self::text(&signatures) == text {
        true => Ok(signatures),
        false => Err(form()),
    }
}

fn message(digest: &str) -> String {
    format!("{MESSAGE_TITLE}\n{digest}\n")
}

fn text(signatures: &[BundleSignature]) -> String {
    let line = |one: &BundleSignature| format!("{} {}\n", one.key, hex::encode(one.signature.to_bytes()));
    signatures.iter().map(line).collect()
}

const PREFIX: &str = "ed25519:";
/// A private key's PEM has 119 bytes; a much larger file is not a key.
const LONGEST_KEY_FILE: u64 = 4096;

/// Ed25519 public key of a signer, written as `ed25519:` and 64 hexadecimal digits.
#[derive(Clone, PartialEq, Eq)]
pub struct PublicKey(VerifyingKey);

/// First characters of a PEM file.
const PEM: &str = "-----BEGIN ";

const PUBLIC_PEM: &str = "-----BEGIN PUBLIC KEY-----";

/// Ed25519 private key for signing bundles. No message and no `Debug` output shows it.
pub struct SigningKey {
    key: ed25519_dalek::SigningKey,
    form: KeyForm,
}

/// The form of a private key's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyForm {
    /// PKCS#8 version 1 (RFC 5208), as OpenSSL writes and reads it.
    Pkcs8,
    /// PKCS#8 version 2 (RFC 5958), with the public key: what earlier versions of querl wrote. OpenSSL does not read it.
    Pkcs8WithPublicKey,
}

impl PublicKey {
    /// Parses `ed25519:` and 64 hexadecimal digits, or the text of a PEM file (`BEGIN PUBLIC KEY`); `origin` names the source of the
    /// text in messages.
    ///
    /// # Errors
    /// The text has another form, or is not a usable key.
    pub fn parse(text: &str, origin: &str) -> Result<Self, BundleError> {
        let refuse = |message: &str| BundleError::Key { origin: origin.to_owned(), message: message.to_owned() };
        if text.trim_start().starts_with(PEM) {
            let key = VerifyingKey::from_public_key_pem(text.trim()).ok().filter(|key| !key.is_weak());
            return key.map(Self).ok_or_else(|| match text.contains("PRIVATE KEY") {
                true => refuse(
                    "holds a private key; give the public one, which `querl plugin sign --new-key` writes next to it as `.pub`",
                ),
                false => refuse("holds no ed25519 public key in PEM (`BEGIN PUBLIC KEY`)"),
            });
        }
        let mut bytes = [0; 32];
        let digits = text.strip_prefix(PREFIX).filter(|digits| !digits.bytes().any(|byte| byte.is_ascii_uppercase()));
        let decoded = digits.and_then(|digits| hex::decode_to_slice(digits, &mut bytes).ok());
        decoded.ok_or_else(|| refuse("not a public key; expected `ed25519:` and 64 of 0 to 9 and a to f"))?;
        let key = VerifyingKey::from_bytes(&bytes).ok().filter(|key| !key.is_weak());
        key.map(Self).ok_or_else(|| refuse("not an ed25519 key, though it has the form of one; copy it again"))
    }

    /// The key as a PEM file (SubjectPublicKeyInfo, `BEGIN PUBLIC KEY`).
    pub fn to_pem(&self) -> String {
        self.0.to_public_key_pem(LineEnding::LF).expect("an ed25519 key always has this form")
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
    /// Generates a key from the operating system's random numbers.
    ///
    /// # Errors
    /// The operating system provides no random numbers.
    pub fn generate() -> Result<Self, BundleError> {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).map_err(|error| BundleError::Key {
            origin: "new key".to_owned(),
            message: format!("the operating system gave no random numbers: {error}"),
        })?;
        let key = ed25519_dalek::SigningKey::from_bytes(&secret);
        secret.fill(0);
        Ok(Self { key, form: KeyForm::Pkcs8 })
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
        let pem = std::fs::read_to_string(path).map_err(|source| BundleError::io(path, source))?;
        if pem.trim_start().starts_with(PUBLIC_PEM) {
            return refuse(
                "holds a public key; name the private one, which `querl plugin sign --new-key` writes next to it"
                    .into(),
            );
        }
        if let Some(mode) = open_to_others(&metadata) {
            return refuse(format!("has mode {mode:o}, so that others may read it; run `chmod 600` on it"));
        }
        let bytes = KeypairBytes::from_pkcs8_pem(&pem).ok();
        let form = match bytes.as_ref().is_some_and(|bytes| bytes.public_key.is_some()) {
            true => KeyForm::Pkcs8WithPublicKey,
            false => KeyForm::Pkcs8,
        };
        match bytes.and_then(|bytes| ed25519_dalek::SigningKey::try_from(&bytes).ok()) {
            Some(key) => Ok(Self { key, form }),
            None => refuse(
                "holds no ed25519 private key in PKCS#8 PEM; make one with `querl plugin sign --new-key FILE`".into(),
            ),
        }
    }

    /// Writes the key to a new file with mode 0600.
    ///
    /// # Errors
    /// The file exists (it is not changed), or it cannot be written.
    pub fn write_new(&self, path: &Path) -> Result<(), BundleError> {
        // Without the public key: OpenSSL reads only version 1.
        let bytes = KeypairBytes { secret_key: self.key.to_bytes(), public_key: None };
        let pem = bytes.to_pkcs8_pem(LineEnding::LF).expect("an ed25519 key always has a PKCS#8 form");
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

    /// The public key of this private key.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.key.verifying_key())
    }

    /// The form of the file that the key was read from.
    pub fn form(&self) -> KeyForm {
        self.form
    }
}

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[private key of {}]", self.public())
    }
}

/// The permission bits if others than the owner can read the file.
#[cfg(unix)]
fn open_to_others(metadata: &std::fs::Metadata) -> Option<u32> {
    let mode = std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o777;
    (mode & 0o077 != 0).then_some(mode)
}

#[cfg(not(unix))]
fn open_to_others(_: &std::fs::Metadata) -> Option<u32> {
    None
}
