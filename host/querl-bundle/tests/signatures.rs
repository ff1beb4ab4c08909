//! Keys in files, signatures in bundles.
#![allow(clippy::unwrap_used)]

mod common;

use common::{archive_of, entries, packed};
use querl_bundle::{Bundle, PublicKey, SigningKey, sign};

#[test]
fn signed_bundle_is_verified_by_its_keys_alone() {
    let (alice, bob, eve) =
        (SigningKey::generate().unwrap(), SigningKey::generate().unwrap(), SigningKey::generate().unwrap());
    let unsigned = Bundle::from_bytes(&packed(), "x.querl").unwrap();
    let signed = sign(&sign(&packed(), &alice).unwrap(), &bob).unwrap();
    let bundle = Bundle::from_bytes(&signed, "x.querl").unwrap();
    assert_eq!(bundle.digest(), unsigned.digest());
    assert_eq!(bundle.component(), unsigned.component());
    assert_eq!(bundle.signatures().len(), 2);
    assert_eq!(bundle.verify(&[eve.public(), bob.public()]).unwrap(), bob.public());
    let error = bundle.verify(&[eve.public()]).unwrap_err().to_string();
    assert!(error.contains("signed by ed25519:"), "{error}");
    assert!(error.ends_with(&format!("expected a signature of {}", eve.public())), "{error}");
    let error = unsigned.verify(&[eve.public()]).unwrap_err().to_string();
    assert_eq!(error, format!("x.querl: not signed; expected a signature of {}", eve.public()));
    assert!(bundle.verify(&[]).unwrap_err().to_string().contains("no key is trusted"));
}

#[test]
fn order_of_signing_and_signing_twice_make_no_difference() {
    let (alice, bob) = (SigningKey::generate().unwrap(), SigningKey::generate().unwrap());
    let one = sign(&sign(&packed(), &alice).unwrap(), &bob).unwrap();
    let other = sign(&sign(&packed(), &bob).unwrap(), &alice).unwrap();
    assert_eq!(one, other);
    assert_eq!(sign(&one, &alice).unwrap(), one);
}

#[test]
fn signature_of_another_bundle_does_not_fit() {
    let key = SigningKey::generate().unwrap();
    let folder = common::plugin_folder();
    std::fs::write(folder.path().join("README.md"), "# 另一个\n").unwrap();
    let other = sign(&querl_bundle::pack(folder.path(), &common::component()).unwrap(), &key).unwrap();
    let mut forged = entries(&packed());
    forged.push(entries(&other).pop().unwrap());
    let error = Bundle::from_bytes(&archive_of(&forged), "x.querl").unwrap_err().to_string();
    let expected = "x.querl: signatures: has a signature in line 1 that does not fit the bundle";
    assert!(error.starts_with(expected), "{error}");
}

#[test]
fn more_than_sixteen_signatures_are_refused() {
    let mut bundle = packed();
    for _ in 0..16 {
        bundle = sign(&bundle, &SigningKey::generate().unwrap()).unwrap();
    }
    let error = sign(&bundle, &SigningKey::generate().unwrap()).unwrap_err().to_string();
    assert!(error.contains("signatures: has 16 signatures"), "{error}");
}

#[test]
fn key_file_is_private_and_never_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("team.key");
    let key = SigningKey::generate().unwrap();
    key.write_new(&path).unwrap();
    assert_eq!(SigningKey::read(&path).unwrap().public(), key.public());
    let pem = std::fs::read_to_string(&path).unwrap();
    assert!(pem.starts_with("-----BEGIN PRIVATE KEY-----\n"));
    let error = SigningKey::generate().unwrap().write_new(&path).unwrap_err().to_string();
    assert!(error.ends_with("team.key: is there already; a key is never overwritten, choose another name"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), pem);
    assert!(!format!("{key:?}").contains(pem.lines().nth(1).unwrap()));
}

#[cfg(unix)]
#[test]
fn key_file_that_others_can_read_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("team.key");
    SigningKey::generate().unwrap().write_new(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
    let error = SigningKey::read(&path).unwrap_err().to_string();
    assert!(error.ends_with("team.key: has mode 640, so that others may read it; run `chmod 600` on it"), "{error}");
}

#[cfg(unix)]
#[test]
fn other_files_are_no_keys() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.key");
    for text in ["", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", &"x".repeat(5000)] {
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let error = SigningKey::read(&path).unwrap_err().to_string();
        assert!(error.contains("x.key: holds no ed25519 private key") || error.contains("has 5000 bytes"), "{error}");
    }
}

#[test]
fn public_keys_have_one_form() {
    let key = SigningKey::generate().unwrap().public();
    assert_eq!(PublicKey::parse(&key.to_string(), "x").unwrap(), key);
    let zero_point = format!("ed25519:01{}", "0".repeat(62));
    for text in ["", "ed25519:", &key.to_string().to_uppercase(), &key.to_string()[8..], &format!("{key}0")] {
        let error = PublicKey::parse(text, "plugins.trusted_keys[0]").unwrap_err().to_string();
        assert_eq!(error, "plugins.trusted_keys[0]: not a public key; expected `ed25519:` and 64 of 0 to 9 and a to f");
    }
    // The neutral element of the curve: anyone can forge signatures of this key.
    assert!(PublicKey::parse(&zero_point, "x").unwrap_err().to_string().contains("not an ed25519 key"));
}
