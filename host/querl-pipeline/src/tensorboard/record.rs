//! The framing of event files: length, checksum of the length, data, checksum of the data.
//!
//! Source: TensorFlow's `lib/io/record_writer.cc`.

/// Bytes before the data (length and its checksum) and after it.
const HEADER: usize = 12;
const FOOTER: usize = 4;

pub(super) fn write_record(out: &mut Vec<u8>, data: &[u8]) {
    let length = (data.len() as u64).to_le_bytes();
    out.extend_from_slice(&length);
    out.extend_from_slice(&masked_checksum(&length).to_le_bytes());
    out.extend_from_slice(data);
    out.extend_from_slice(&masked_checksum(data).to_le_bytes());
}

/// CRC-32C, rotated and shifted by a constant, so that a checksum of checksums is none by accident.
fn masked_checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The whole records at the beginning of some bytes: data, and where the next record begins. Ends before the first that is cut
/// short or damaged.
pub(super) struct Records<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Records<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    fn read(&self) -> Option<(&'a [u8], usize)> {
        let rest = self.bytes.get(self.position..)?;
        let length = rest.get(..8)?;
        let size = usize::try_from(u64::from_le_bytes(length.try_into().ok()?)).ok()?;
        let end = HEADER.checked_add(size)?;
        let (data, footer) = (rest.get(HEADER..end)?, rest.get(end..end.checked_add(FOOTER)?)?);
        let is_whole = checksum_at(rest, 8)? == masked_checksum(length)
            && u32::from_le_bytes(footer.try_into().ok()?) == masked_checksum(data);
        is_whole.then_some((data, self.position + end + FOOTER))
    }
}

fn checksum_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

impl<'a> Iterator for Records<'a> {
    type Item = (&'a [u8], usize);

    fn next(&mut self) -> Option<Self::Item> {
        let (data, next) = self.read()?;
        self.position = next;
        Some((data, next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_record_ends_the_file() {
        let mut bytes = Vec::new();
        write_record(&mut bytes, b"one");
        let first = bytes.len();
        write_record(&mut bytes, b"two");
        let whole: Vec<&[u8]> = Records::new(&bytes).map(|(data, _)| data).collect();
        assert_eq!(whole, [b"one", b"two"]);
        assert_eq!(Records::new(&bytes[..bytes.len() - 1]).last(), Some((&b"one"[..], first)));
        bytes[first + HEADER] ^= 1;
        assert_eq!(Records::new(&bytes).count(), 1);
    }
}
