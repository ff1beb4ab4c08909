//! The seal: a zstd skippable frame with the SHA-256 of everything before it.
//!
//! A zstd frame can be written in more than one way, and its own checksum has 32 bits and does not cover its header. The seal
//! covers every byte of the file, so that none can change unseen. An attacker who changes a file can compute a new seal: against
//! that, there are signatures.

use super::Damage;
use sha2::{Digest, Sha256};

/// Magic number of a skippable frame (RFC 8878, 3.1.2): 0x184D2A50 to 0x184D2A5F, here the one that ends in 5.
const MAGIC: [u8; 4] = 0x184D_2A55_u32.to_le_bytes();
const SIZE: [u8; 4] = 32_u32.to_le_bytes();
const SEAL_BYTES: usize = 40;

pub(super) fn seal(mut frame: Vec<u8>) -> Vec<u8> {
    let digest = Sha256::digest(&frame);
    frame.extend_from_slice(&MAGIC);
    frame.extend_from_slice(&SIZE);
    frame.extend_from_slice(&digest);
    frame
}

/// The frame that an intact seal covers.
pub(super) fn unseal(bytes: &[u8]) -> Result<&[u8], Damage> {
    let start = bytes.len().checked_sub(SEAL_BYTES);
    let Some((frame, seal)) = start.map(|start| bytes.split_at(start)) else {
        return Err(Damage::new("seal", "is missing; the file is truncated or is not a bundle"));
    };
    if seal[..4] != MAGIC || seal[4..8] != SIZE {
        let message = "is missing or damaged; the file is truncated, has bytes after its end, or is not a bundle";
        return Err(Damage::new("seal", message));
    }
    match seal[8..] == Sha256::digest(frame)[..] {
        true => Ok(frame),
        false => Err(Damage::new(
            "compressed stream",
            "does not have the SHA-256 in the seal; bytes of the file were changed or lost after packing",
        )),
    }
}
