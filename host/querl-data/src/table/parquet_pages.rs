//! Checks the page sizes of a parquet file before the library allocates memory for them. A page header of a few bytes can declare a page,
//! a dictionary or a list of lengths of gigabytes, and gzip inflates to a thousand times its size.
//!
//! Source: the Parquet format, `parquet.thrift` (`PageHeader`) and Encodings.md (delta encodings); Thrift's compact protocol.

use flate2::read::MultiGzDecoder;
use parquet::basic::{Compression, Encoding};
use parquet::column::page::{Page, PageReader};
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

/// Maximum size of a page, compressed and decompressed. Writers make pages of about a MiB.
const MAX_PAGE_BYTES: u64 = 256 << 20;

/// Maximum number of values of a page or dictionary.
const MAX_PAGE_VALUES: u64 = 1 << 24;

/// Maximum size of the metadata at the end of the file, which take up to a hundred times as much memory.
const MAX_FOOTER_BYTES: u64 = 16 << 20;

/// Checks the size of the metadata that the last bytes of the file declare.
pub(super) fn check_footer(file: &mut File) -> Result<(), ParquetError> {
    let mut end = [0; 8];
    if file.metadata()?.len() < end.len() as u64 {
        // The library reports this error.
        return Ok(());
    }
    file.seek(SeekFrom::End(-8))?;
    file.read_exact(&mut end)?;
    let [a, b, c, d, ..] = end;
    match u64::from(u32::from_le_bytes([a, b, c, d])) {
        n_bytes if n_bytes > MAX_FOOTER_BYTES => {
            Err(general(format!("declares {n_bytes} bytes of metadata; expected at most {MAX_FOOTER_BYTES}")))
        }
        _ => Ok(()),
    }
}

/// Checks all pages of the columns with the given indices.
pub(super) fn check_pages(
    path: &Path,
    reader: &SerializedFileReader<File>,
    columns: &[usize],
) -> Result<(), ParquetError> {
    let mut file = BufReader::new(File::open(path)?);
    for (group_index, group) in reader.metadata().row_groups().iter().enumerate() {
        for (index, chunk) in group.columns().iter().enumerate() {
            if !columns.contains(&group.schema_descr().get_column_root_idx(index)) {
                continue;
            }
            let of_column = |problem: &dyn std::fmt::Display| {
                general(format!("column `{}`: {problem}", chunk.column_path().string()))
            };
            let has_lengths = check_chunk(&mut file, chunk).map_err(|error| of_column(&error))?;
            if has_lengths {
                let mut pages = reader.get_row_group(group_index)?.get_column_page_reader(index)?;
                check_lengths(pages.as_mut(), chunk).map_err(|error| of_column(&error))?;
            }
        }
    }
    Ok(())
}

fn general(problem: String) -> ParquetError {
    ParquetError::General(problem)
}

fn invalid(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem.into())
}

/// Checks the headers of all pages, and inflates those of gzip. Returns whether a page has texts with delta-encoded lengths.
fn check_chunk(file: &mut BufReader<File>, chunk: &ColumnChunkMetaData) -> io::Result<bool> {
    let (start, mut n_left) = chunk.byte_range();
    file.seek(SeekFrom::Start(start))?;
    let mut has_lengths = false;
    while n_left > 0 {
        let header = PageHeader::read(file)?;
        let too_long = || invalid("a page is longer than its column");
        n_left = n_left.checked_sub(header.n_bytes).ok_or_else(too_long)?;
        n_left = n_left.checked_sub(header.compressed).ok_or_else(too_long)?;
        header.check()?;
        has_lengths |= [Encoding::DELTA_LENGTH_BYTE_ARRAY, Encoding::DELTA_BYTE_ARRAY]
            .into_iter()
            .any(|encoding| header.encoding == encoding as u64);
        match chunk.compression() {
            Compression::GZIP(_) if header.is_compressed => check_gzip(file, &header)?,
            _ => file.seek_relative(header.compressed as i64)?,
        }
    }
    Ok(has_lengths)
}

/// The library inflates a page to its end, whatever size its header declares.
fn check_gzip(file: &mut BufReader<File>, header: &PageHeader) -> io::Result<()> {
    let mut page = file.take(header.compressed);
    io::copy(&mut page.by_ref().take(header.level_bytes), &mut io::sink())?;
    let declared = header.uncompressed.saturating_sub(header.level_bytes);
    let mut inflated = MultiGzDecoder::new(page.by_ref()).take(declared + 1);
    let n_bytes = if declared == 0 { 0 } else { io::copy(&mut inflated, &mut io::sink())? };
    if n_bytes != declared {
        return Err(invalid(format!("a page does not inflate to the {declared} bytes that it declares")));
    }
    io::copy(&mut page, &mut io::sink()).map(drop)
}

/// The sizes in a page header.
#[derive(Debug, Default)]
struct PageHeader {
    /// Size of the page header.
    n_bytes: u64,
    uncompressed: u64,
    compressed: u64,
    n_values: u64,
    encoding: u64,
    /// Bytes before the values that are not compressed.
    level_bytes: u64,
    is_compressed: bool,
}

impl PageHeader {
    fn read(input: &mut impl Read) -> io::Result<Self> {
        let mut header = Self { is_compressed: true, ..Self::default() };
        let mut input = CompactReader { input, n_bytes: 0 };
        input.read_struct(0, 0, &mut |outer, field, value| {
            // A negative number becomes too large.
            let value = value as u64;
            match (outer, field) {
                (0, 2) => header.uncompressed = value,
                (0, 3) => header.compressed = value,
                // Data page, dictionary page, data page of version 2.
                (5 | 7 | 8, 1) => header.n_values = value,
                (5 | 7, 2) | (8, 4) => header.encoding = value,
                (8, 5 | 6) => header.level_bytes = header.level_bytes.saturating_add(value),
                (8, 7) => header.is_compressed = value != 0,
                _ => {}
            }
        })?;
        header.n_bytes = input.n_bytes;
        Ok(header)
    }

    fn check(&self) -> io::Result<()> {
        let n_bytes = self.uncompressed.max(self.compressed);
        if n_bytes > MAX_PAGE_BYTES || self.level_bytes > self.compressed {
            return Err(invalid(format!("a page declares {n_bytes} bytes; expected at most {MAX_PAGE_BYTES}")));
        }
        if self.n_values > MAX_PAGE_VALUES {
            let n_values = self.n_values;
            return Err(invalid(format!("a page declares {n_values} values; expected at most {MAX_PAGE_VALUES}")));
        }
        Ok(())
    }
}

/// Reads structs of Thrift's compact protocol.
struct CompactReader<'a, R> {
    input: &'a mut R,
    n_bytes: u64,
}

impl<R: Read> CompactReader<'_, R> {
    /// Passes each number of a struct and of the structs in it to `note`: the field of the outer struct, the field, the value.
    fn read_struct(&mut self, outer: i64, depth: usize, note: &mut dyn FnMut(i64, i64, i64)) -> io::Result<()> {
        const MAX_DEPTH: usize = 8;
        let mut field = 0;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Ok(());
            }
            field = match head >> 4 {
                0 => self.zigzag()?,
                delta => i64::from(delta).wrapping_add(field),
            };
            match head & 0x0f {
                kind @ (1 | 2) => note(outer, field, i64::from(kind == 1)),
                3 => note(outer, field, i64::from(self.byte()?)),
                4..=6 => note(outer, field, self.zigzag()?),
                7 => self.skip(8)?,
                8 => {
                    let n_bytes = self.varint()?;
                    self.skip(n_bytes)?;
                }
                // Numbers in inner structs are statistics.
                12 if depth < MAX_DEPTH => {
                    self.read_struct(if depth == 0 { field } else { -1 }, depth + 1, note)?;
                }
                _ => return Err(invalid("a page header is not readable")),
            }
        }
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.input.read_exact(&mut byte)?;
        self.n_bytes += 1;
        Ok(byte[0])
    }

    fn varint(&mut self) -> io::Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(invalid("a page header holds a number of more than 64 bits"))
    }

    fn zigzag(&mut self) -> io::Result<i64> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    fn skip(&mut self, n_bytes: u64) -> io::Result<()> {
        self.n_bytes = self.n_bytes.saturating_add(n_bytes);
        match io::copy(&mut self.input.take(n_bytes), &mut io::sink())? {
            n_skipped if n_skipped == n_bytes => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Checks the numbers of lengths that delta-encoded texts declare within their pages.
fn check_lengths(pages: &mut dyn PageReader, chunk: &ColumnChunkMetaData) -> Result<(), ParquetError> {
    while let Some(page) = pages.get_next_page()? {
        let (values, encoding, n_values) = match &page {
            Page::DataPage { buf, encoding, num_values, .. } => {
                let column = chunk.column_descr();
                let n_levels = usize::from(column.max_rep_level() > 0) + usize::from(column.max_def_level() > 0);
                let values = (0..n_levels).try_fold(&buf[..], |rest, _| {
                    let (n_bytes, rest) = rest.split_first_chunk()?;
                    rest.get(u32::from_le_bytes(*n_bytes) as usize..)
                });
                (values, encoding, num_values)
            }
            Page::DataPageV2 { buf, encoding, num_values, def_levels_byte_len, rep_levels_byte_len, .. } => {
                let n_bytes = def_levels_byte_len.saturating_add(*rep_levels_byte_len);
                (buf.get(n_bytes as usize..), encoding, num_values)
            }
            Page::DictionaryPage { .. } => continue,
        };
        let n_lists = match encoding {
            Encoding::DELTA_LENGTH_BYTE_ARRAY => 1,
            Encoding::DELTA_BYTE_ARRAY => 2,
            _ => continue,
        };
        let checked = (0..n_lists).try_fold(values, |rest, _| Some(skip_lengths(rest?, u64::from(*n_values))));
        if checked.flatten().is_none() {
            return Err(general("a page does not hold the lengths of its values".into()));
        }
    }
    Ok(())
}

/// The bytes after a list of at most `max_values` delta-encoded numbers; `None` if it has more or is truncated.
fn skip_lengths(data: &[u8], max_values: u64) -> Option<&[u8]> {
    let mut input = data;
    let mut reader = CompactReader { input: &mut input, n_bytes: 0 };
    let (block_size, n_parts) = (reader.varint().ok()?, reader.varint().ok()?);
    let mut n_left = reader.varint().ok().filter(|n_values| *n_values <= max_values)?.saturating_sub(1);
    reader.zigzag().ok()?;
    let part_size = block_size.checked_div(n_parts).filter(|part_size| *part_size > 0)?;
    while n_left > 0 {
        reader.zigzag().ok()?;
        let (bit_widths, rest) = reader.input.split_at_checked(usize::try_from(n_parts).ok()?)?;
        *reader.input = rest;
        for bit_width in bit_widths {
            if n_left == 0 {
                break;
            }
            reader.skip(u64::from(*bit_width).checked_mul(part_size)? / 8).ok()?;
            n_left = n_left.saturating_sub(part_size);
        }
    }
    Some(input)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn varint(mut value: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while value > 0x7f {
            bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        bytes.push(value as u8);
        bytes
    }

    /// A header with the sizes after decompression and in the file, and a dictionary of `n_values`.
    fn header(uncompressed: u64, compressed: u64, n_values: u64) -> Vec<u8> {
        let field = |head: u8, value: u64| [vec![head], varint(2 * value)].concat();
        let dictionary = [vec![0x4c], field(0x15, n_values), field(0x15, 0), vec![0]].concat();
        [field(0x15, 2), field(0x15, uncompressed), field(0x15, compressed), dictionary, vec![0]].concat()
    }

    #[test]
    fn declared_sizes_are_bounded() {
        let check = |bytes: &[u8]| {
            let header = PageHeader::read(&mut &bytes[..])?;
            assert_eq!(header.n_bytes, bytes.len() as u64);
            header.check().map(|()| header.n_values)
        };
        assert_eq!(check(&header(1 << 20, 1 << 19, 300)).unwrap(), 300);
        let error = |bytes: &[u8]| check(bytes).unwrap_err().to_string();
        assert_eq!(error(&header(1 << 30, 9, 1)), "a page declares 1073741824 bytes; expected at most 268435456");
        assert_eq!(error(&header(9, 9, 1 << 30)), "a page declares 1073741824 values; expected at most 16777216");
        let negative = [&[0x15; 6][..], &[0]].concat();
        assert_eq!(error(&negative), "a page declares 18446744073709551605 bytes; expected at most 268435456");
        assert_eq!(error(&[0x1c; 30]), "a page header is not readable");
        assert_eq!(error(&[0x18, 0xff, 0xff, 0xff, 0xff, 0x7f, 1]), "unexpected end of file");
    }

    #[test]
    fn lists_of_lengths_end_where_their_values_end() {
        // Blocks of 128 values in 4 parts; 3 values; first 5; one block with a part of 2 bits.
        let list = [0x80, 1, 4, 3, 10, 0, 2, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, b'x'];
        assert_eq!(skip_lengths(&list, 3), Some(&b"x"[..]));
        assert_eq!(skip_lengths(&list, 2), None);
        assert_eq!(skip_lengths(&list[..12], 3), None);
        assert_eq!(skip_lengths(&[0x80, 1, 0, 3, 10], 3), None);
        assert_eq!(skip_lengths(&[0x80, 1, 4, 1, 10, b'x'], 3), Some(&b"x"[..]));
    }
}
