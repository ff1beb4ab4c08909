//! Packed batches: episodes, and their scores, in one byte buffer. The encoding is specified in `packed-rewards.wit`; that of an
//! episode differs between versions of the contract.

use crate::contract::ItemResult;
use querl_core::records::{Rejection, Reward, RewardComponent};

/// Limit of the reservation, because the first episode may be much larger than the others.
const MAX_RESERVED_BYTES: usize = 4 << 20;

/// Encodes a list: the number of items, then each item as `write` encodes it.
pub(crate) fn list<T>(items: &[T], mut write: impl FnMut(&mut Writer, &T)) -> Vec<u8> {
    // Reserves 1.5 times the size of the first item for each other one, which avoids most reallocations.
    let mut writer = Writer(Vec::with_capacity(4096));
    writer.u32(items.len());
    for (index, item) in items.iter().enumerate() {
        write(&mut writer, item);
        if index == 0 {
            let expected = writer.0.len().saturating_mul(items.len() - 1).saturating_mul(3) / 2;
            writer.0.reserve(expected.min(MAX_RESERVED_BYTES));
        }
    }
    writer.0
}

pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, byte: u8) {
        self.0.push(byte);
    }

    /// Writes a count or a length. A number above `u32::MAX` is written as that maximum, which the guest refuses: its memory has
    /// at most 4 GiB.
    pub(crate) fn u32(&mut self, number: usize) {
        self.0.extend_from_slice(&u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes());
    }

    pub(crate) fn u64(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    pub(crate) fn f64(&mut self, number: f64) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.u32(text.len());
        self.0.extend_from_slice(text.as_bytes());
    }

    pub(crate) fn list<T>(&mut self, items: &[T], mut write: impl FnMut(&mut Self, &T)) {
        self.u32(items.len());
        items.iter().for_each(|item| write(self, item));
    }

    pub(crate) fn option<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        self.u8(u8::from(value.is_some()));
        if let Some(value) = value {
            write(self, value);
        }
    }
}

/// Decodes the result of `score-packed` for `n_items` episodes into at most `max_bytes`.
pub(crate) fn results(bytes: &[u8], n_items: usize, max_bytes: usize) -> Result<Vec<ItemResult>, FormError> {
    let mut reader = Reader { bytes, at: 0, room_bytes: max_bytes };
    let n_results = reader.u32()?;
    if n_results != n_items {
        return Err(FormError::Number { n_results, n_items });
    }
    let results = reader.entries(n_results, Reader::result)?;
    if reader.at != bytes.len() {
        return Err(reader.expected("its end"));
    }
    Ok(results)
}

/// Why the results of a batch cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FormError {
    /// The guest's results are not in the packed encoding: what was expected at the byte `at`.
    #[error("byte {at} of its packed results: expected {expected}")]
    Byte { at: usize, expected: &'static str },
    /// There are more or fewer results than episodes; checked before any result is decoded.
    #[error("its packed results are {n_results}; expected {n_items}, one for each episode")]
    Number { n_results: usize, n_items: usize },
    /// The decoded results would exceed the output limit; checked while decoding, since a few encoded bytes can decode to many.
    #[error("its packed results are too large")]
    TooLarge,
    /// The JSON interface (`score-json`) failed: the guest's results cannot be parsed, or the episodes cannot be serialised.
    #[error("its JSON of results: {0}")]
    Json(String),
}

/// Decodes untrusted bytes of a guest.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Remaining number of `max_bytes`.
    room_bytes: usize,
}

impl<'a> Reader<'a> {
    fn expected(&self, expected: &'static str) -> FormError {
        FormError::Byte { at: self.at, expected }
    }

    fn take(&mut self, n_bytes: usize) -> Result<&'a [u8], FormError> {
        let taken = self.bytes[self.at..].get(..n_bytes).ok_or_else(|| self.expected("more bytes, found the end"))?;
        self.at += n_bytes;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FormError> {
        let taken = self.bytes[self.at..].first_chunk().ok_or_else(|| self.expected("more bytes, found the end"))?;
        self.at += N;
        Ok(*taken)
    }

    fn u32(&mut self) -> Result<usize, FormError> {
        self.array().map(|bytes| u32::from_le_bytes(bytes) as usize)
    }

    fn f64(&mut self) -> Result<f64, FormError> {
        self.array().map(f64::from_le_bytes)
    }

    fn text(&mut self) -> Result<String, FormError> {
        let n_bytes = self.u32()?;
        let bytes = self.take(n_bytes)?;
        self.charge(n_bytes)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| self.expected("the text that ends here to be UTF-8"))
    }

    fn charge(&mut self, n_bytes: usize) -> Result<(), FormError> {
        self.room_bytes = self.room_bytes.checked_sub(n_bytes).ok_or(FormError::TooLarge)?;
        Ok(())
    }

    /// Reads a list. Every entry takes at least one byte, which limits the length of the list; its memory is charged before it is
    /// allocated.
    fn entries<T>(
        &mut self,
        n_entries: usize,
        entry: impl Fn(&mut Self) -> Result<T, FormError>,
    ) -> Result<Vec<T>, FormError> {
        if n_entries > self.bytes.len() - self.at {
            return Err(self.expected("as many entries as its length says"));
        }
        self.charge(n_entries.saturating_mul(size_of::<T>()))?;
        let mut entries = Vec::with_capacity(n_entries);
        for _ in 0..n_entries {
            entries.push(entry(self)?);
        }
        Ok(entries)
    }

    fn result(&mut self) -> Result<ItemResult, FormError> {
        match self.array()? {
            [0] => self.score().map(Ok),
            [1] => Ok(Err(Rejection::new(self.text()?, self.text()?))),
            _ => Err(self.expected("0 (score) or 1 (rejection) in the byte before this")),
        }
    }

    fn score(&mut self) -> Result<Reward, FormError> {
        let total = self.f64()?;
        let n_parts = self.u32()?;
        let part = |reader: &mut Self| Ok(RewardComponent { name: reader.text()?, value: reader.f64()? });
        Ok(Reward { total, components: self.entries(n_parts, part)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(bytes: &[u8], n_items: usize) -> Result<Vec<ItemResult>, FormError> {
        super::results(bytes, n_items, 1000)
    }

    /// A handmade list of results: a score with one component, and a rejection.
    fn two_results() -> Vec<u8> {
        let mut bytes = vec![2, 0, 0, 0];
        bytes.push(0);
        bytes.extend(0.5_f64.to_le_bytes());
        bytes.extend([1, 0, 0, 0, 3, 0, 0, 0]);
        bytes.extend(b"win");
        bytes.extend((-0.3_f64).to_le_bytes());
        bytes.extend([1, 4, 0, 0, 0]);
        bytes.extend(b"late");
        bytes.extend([3, 0, 0, 0]);
        bytes.extend("晚".as_bytes());
        bytes
    }

    #[test]
    fn results_are_read_as_the_contract_writes_them() {
        let result = results(&two_results(), 2).unwrap();
        let components = vec![RewardComponent { name: "win".into(), value: -0.3 }];
        assert_eq!(result[0].as_ref().unwrap(), &Reward { total: 0.5, components });
        let rejection = result[1].as_ref().unwrap_err();
        assert_eq!((rejection.code.as_str(), rejection.detail.as_str()), ("late", "晚"));
    }

    #[test]
    fn results_that_end_early_or_late_name_the_byte() {
        let whole = two_results();
        for n_bytes in 0..whole.len() {
            assert!(results(&whole[..n_bytes], 2).is_err(), "{n_bytes} of {} bytes", whole.len());
        }
        let error = results(&[&whole[..], &[0]].concat(), 2).unwrap_err().to_string();
        assert_eq!(error, format!("byte {} of its packed results: expected its end", whole.len()));
        let error = results(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255], 1).unwrap_err().to_string();
        assert_eq!(error, "byte 17 of its packed results: expected as many entries as its length says");
    }

    #[test]
    fn number_of_results_is_refused_before_they_are_read() {
        let error = results(&[255, 255, 255, 255], 3).unwrap_err().to_string();
        assert_eq!(error, "its packed results are 4294967295; expected 3, one for each episode");
        assert!(results(&two_results(), 1).is_err());
    }

    #[test]
    fn what_results_become_is_held_to_a_limit_before_it_is_made() {
        // 100 components of 12 bytes each: none of them has a name.
        let bytes = [&[1, 0, 0, 0, 0][..], &[0; 8], &[100, 0, 0, 0], &[0; 1200]].concat();
        assert!(matches!(super::results(&bytes, 1, 3000), Err(FormError::TooLarge)));
        assert_eq!(super::results(&bytes, 1, 4000).unwrap()[0].as_ref().unwrap().components.len(), 100);
    }

    #[test]
    fn odd_cases_and_texts_are_refused() {
        let error = results(&[1, 0, 0, 0, 7], 1).unwrap_err().to_string();
        assert_eq!(error, "byte 5 of its packed results: expected 0 (score) or 1 (rejection) in the byte before this");
        let error = results(&[1, 0, 0, 0, 1, 2, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0], 1).unwrap_err().to_string();
        assert_eq!(error, "byte 11 of its packed results: expected the text that ends here to be UTF-8");
    }
}
