//! Signatures over a bundle's digest.
//!
//! What is signed is the line `querl bundle signature 1`, a line feed, the digest in hexadecimal and a line feed: no signature
//! made for another purpose fits a bundle, and none of a bundle fits anything else.

use crate::archive::{self, Damage, names};
use crate::bundle::Bundle;
use crate::error::BundleError;
use crate::keys::{PublicKey, SigningKey};
use ed25519_dalek::{Signature, Signer};

const MESSAGE_TITLE: &str = "querl bundle signature 1";
/// More is not a list of people who looked at a plugin.
const MOST_SIGNATURES: usize = 16;

/// A signature that fits the bundle it is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleSignature {
    key: PublicKey,
    signature: Signature,
}

impl BundleSignature {
    /// Who signed.
    pub fn key(&self) -> &PublicKey {
        &self.key
    }
}

/// The bundle `bytes` with a signature of `key` added; where `key` has signed it already, the same bytes.
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
    let signature = key.signing().sign(message(bundle.digest()).as_bytes());
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
        key.verifying().verify_strict(message(digest).as_bytes(), &signature).map_err(|_| {
            refuse(format!(
                "has a signature in line {} that does not fit the bundle; one of the two was changed",
                index + 1
            ))
        })?;
        signatures.push(BundleSignature { key, signature });
    }
    // Sorted, each key once, nothing but what we would write: no byte may differ without being noticed.
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
