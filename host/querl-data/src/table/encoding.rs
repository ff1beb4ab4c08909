//! Detects the encoding of a text file, and decodes it to UTF-8.

use crate::error::DataError;
use chardetng::{EncodingDetector, Iso2022JpDetection, Utf8Detection};
use encoding_rs::{BIG5, Decoder, DecoderResult, EUC_KR, Encoding, GB18030, SHIFT_JIS, UTF_8, UTF_16LE, WINDOWS_1252};
use querl_core::text::printable;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TextEncoding {
    Utf8,
    /// By the byte order mark: UTF-8, or UTF-16, as spreadsheets save "Unicode text".
    Marked(&'static Encoding),
    Guessed(&'static Encoding),
}

impl TextEncoding {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Marked(encoding) if encoding == UTF_8 => "UTF-8 with a byte order mark",
            Self::Marked(encoding) if encoding == UTF_16LE => "UTF-16 (little-endian)",
            Self::Marked(_) => "UTF-16 (big-endian)",
            // `Encoding::name` is in lower case.
            Self::Guessed(encoding) if encoding == GB18030 => "GB18030",
            // The decoder is that of CP949, as Korean spreadsheets call it.
            Self::Guessed(encoding) if encoding == EUC_KR => "EUC-KR/CP949",
            Self::Guessed(encoding) => encoding.name(),
            Self::Utf8 => "UTF-8",
        }
    }

    pub(crate) fn is_guess(self) -> bool {
        matches!(self, Self::Guessed(_))
    }

    fn decoder(self) -> Decoder {
        let encoding = match self {
            Self::Utf8 => UTF_8,
            Self::Marked(encoding) | Self::Guessed(encoding) => encoding,
        };
        encoding.new_decoder_with_bom_removal()
    }
}

/// A file that begins with this many valid multi-byte UTF-8 characters is damaged UTF-8 and not GB18030: a pair of bytes of GB18030 is
/// valid UTF-8 with a probability of about one in eight.
const UTF8_EVIDENCE_CHARS: usize = 16;

/// Detects the encoding by the byte order mark, else UTF-8 if the whole file is valid, else an East Asian encoding or windows-1252 as a
/// guess.
pub(crate) fn detect(path: &Path) -> Result<TextEncoding, DataError> {
    let unreadable = |error: io::Error| DataError::read(path, error);
    let marked = byte_order_mark(path).map_err(unreadable)?;
    let encoding = marked.unwrap_or(TextEncoding::Utf8);
    let Some(error_at) = first_error(path, encoding).map_err(unreadable)? else { return Ok(encoding) };
    let is_cut_off = marked.is_none() && error_at.n_multibyte > 0 && is_cut_off(path, &error_at).map_err(unreadable)?;
    let damaged = |name: &str, error_at: &EncodingError| {
        let what = match error_at.is_zero {
            true => "contains a zero byte, as UTF-16 without a byte order mark does".to_owned(),
            false => format!("a character is not {name}"),
        };
        let path = format!("{}:{}", path.display(), error_at.line);
        Err(DataError::File { path, problem: format!("{what}; save the file again as UTF-8") })
    };
    match marked {
        Some(encoding) => damaged(encoding.name(), &error_at),
        None if error_at.is_zero => damaged("text", &error_at),
        None if is_cut_off || error_at.n_multibyte >= UTF8_EVIDENCE_CHARS => {
            damaged("UTF-8, as those before it are", &error_at)
        }
        None => {
            let guess = guess(path).map_err(unreadable)?;
            match first_error(path, guess).map_err(unreadable)? {
                None if guess == TextEncoding::Guessed(GB18030) && is_western(path).map_err(unreadable)? => {
                    Ok(TextEncoding::Guessed(WINDOWS_1252))
                }
                None => Ok(guess),
                Some(other) => damaged(
                    &format!("UTF-8 or {}", guess.name()),
                    if other.is_zero || other.line > error_at.line { &other } else { &error_at },
                ),
            }
        }
    }
}

fn byte_order_mark(path: &Path) -> io::Result<Option<TextEncoding>> {
    let mut start = Vec::new();
    File::open(path)?.take(3).read_to_end(&mut start)?;
    Ok(Encoding::for_bom(&start).map(|(encoding, _)| TextEncoding::Marked(encoding)))
}

/// Number of bytes at the start of a file by which its encoding is guessed.
const GUESSED_BYTES: u64 = 1 << 20;

/// Texts with fewer bytes outside ASCII are GB18030. Of 12,000 pieces of Chinese queries, pages and program messages with 32 such
/// characters, none was taken for another of the encodings; of those with 16 characters, 3 were.
const GUESS_EVIDENCE_BYTES: usize = 64;

/// Guesses the encoding of a text that is not UTF-8. Most texts are valid in several of these encodings. Encodings of one byte a character
/// are not among them, since any text is valid in them (but see [`is_western`]); nor is EUC-JP, for which symbols in GB18030 are taken.
fn guess(path: &Path) -> io::Result<TextEncoding> {
    let mut start = Vec::new();
    File::open(path)?.take(GUESSED_BYTES).read_to_end(&mut start)?;
    let n_evidence = start.iter().filter(|byte| !byte.is_ascii()).count();
    let mut detector = EncodingDetector::new(Iso2022JpDetection::Deny);
    detector.feed(&start, false);
    // Without a country: for China it would be GB18030 wherever the text is valid in it.
    let guess = detector.guess(None, Utf8Detection::Deny);
    let is_other = n_evidence >= GUESS_EVIDENCE_BYTES && [BIG5, EUC_KR, SHIFT_JIS].contains(&guess);
    Ok(TextEncoding::Guessed(if is_other { guess } else { GB18030 }))
}

/// Whether every run of bytes outside ASCII in a file that is valid GB18030 is part of a word of a Western European language in
/// windows-1252, apart from `€`. In GB18030 the runs of common Chinese characters have two bytes or more, the first of them a symbol or a
/// capital letter.
fn is_western(path: &Path) -> io::Result<bool> {
    let (mut before, mut run, mut has_word) = (b' ', Vec::<u8>::new(), false);
    for byte in BufReader::new(File::open(path)?).bytes() {
        let byte = byte?;
        if byte.is_ascii() || (byte == EURO && run.is_empty()) {
            if !run.is_empty() {
                if !is_western_run(before, &run, byte) {
                    return Ok(false);
                }
                has_word = true;
            }
            run.clear();
            before = byte;
        } else if run.len() == MAX_WESTERN_RUN {
            return Ok(false);
        } else {
            run.push(byte);
        }
    }
    Ok(if run.is_empty() { has_word } else { is_western_run(before, &run, b' ') })
}

/// `€` in windows-1252, and in GB18030 where it is not the second byte of a pair.
const EURO: u8 = 0x80;

/// "öß" in `Größe`, "éé" in `créées`.
const MAX_WESTERN_RUN: usize = 2;

/// Whether bytes next to an ASCII letter are letters with accents and ligatures in windows-1252, without those of Icelandic and `ÿ`. A
/// capital letter must be the only one of its run, and not follow a small one.
fn is_western_run(before: u8, run: &[u8], after: u8) -> bool {
    let is_small = |byte: &u8| matches!(byte, 0xdf..=0xef | 0xf1..=0xf6 | 0xf8..=0xfc);
    let is_capital = |byte: u8| matches!(byte, 0xc0..=0xcf | 0xd1..=0xd6 | 0xd8..=0xdc);
    let is_word = run.iter().all(is_small) || (run.len() == 1 && is_capital(run[0]) && !before.is_ascii_lowercase());
    is_word && (before.is_ascii_alphabetic() || after.is_ascii_alphabetic())
}

/// Position of the first byte that is invalid in an encoding.
struct EncodingError {
    line: usize,
    is_zero: bool,
    n_multibyte: usize,
    n_bytes: u64,
}

/// Whether an error in UTF-8 is a truncated character at the end of the file.
fn is_cut_off(path: &Path, error_at: &EncodingError) -> io::Result<bool> {
    let mut file = File::open(path)?;
    file.seek(io::SeekFrom::Start(error_at.n_bytes))?;
    let mut rest = Vec::new();
    file.take(4).read_to_end(&mut rest)?;
    Ok(std::str::from_utf8(&rest).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none()))
}

fn first_error(path: &Path, encoding: TextEncoding) -> io::Result<Option<EncodingError>> {
    let mut text = Utf8Reader::new(File::open(path)?, encoding);
    let mut error_at = EncodingError { line: 1, is_zero: false, n_multibyte: 0, n_bytes: 0 };
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match text.read(&mut buffer) {
            Ok(0) => return Ok(None),
            Ok(n) => {
                let zero = buffer[..n].iter().position(|byte| *byte == 0);
                let good = &buffer[..zero.unwrap_or(n)];
                error_at.n_bytes += good.len() as u64;
                error_at.line += good.iter().filter(|byte| **byte == b'\n').count();
                // Counts lead bytes of multi-byte characters.
                error_at.n_multibyte += good.iter().filter(|byte| **byte >= 0xc0).count();
                if zero.is_some() {
                    return Ok(Some(EncodingError { is_zero: true, ..error_at }));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Ok(Some(error_at)),
            Err(error) => return Err(error),
        }
    }
}

const BUFFER_BYTES: usize = 1 << 16;

/// Opens a text file as UTF-8 without a byte order mark.
pub(crate) fn open_text(path: &Path, encoding: TextEncoding) -> io::Result<impl Read + Send + use<>> {
    Ok(Utf8Reader::new(File::open(path)?, encoding))
}

/// Maximum size of a lexicon, user dictionary or synonym file, in bytes.
pub(crate) const MAX_VOCABULARY_BYTES: u64 = 64 << 20;

/// Reads a whole dictionary or synonym file in any supported encoding.
pub(crate) fn read_text(path: &Path) -> Result<String, DataError> {
    read_text_up_to(path, MAX_VOCABULARY_BYTES)
}

fn read_text_up_to(path: &Path, max_bytes: u64) -> Result<String, DataError> {
    let unreadable = |error: io::Error| DataError::read(path, error);
    let (encoding, mut bytes) = (detect(path)?, Vec::new());
    let file = open_text(path, encoding).map_err(unreadable)?;
    file.take(max_bytes + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    // Before decoding: the limit may be within a character.
    if bytes.len() as u64 > max_bytes {
        let problem = format!("the file has more than {max_bytes} bytes; leave out what is not needed");
        return Err(DataError::file(path, problem));
    }
    let text = String::from_utf8(bytes).map_err(|error| unreadable(io::Error::other(error)))?;
    warn_of_guess(path, encoding, text.lines());
    Ok(text)
}

/// Maximum length of a decoded text in a message.
const SHOWN_BYTES: usize = 90;
/// Length of the text before the first character outside ASCII in a message, in bytes.
const LEAD_BYTES: usize = 30;

/// An excerpt of a decoded text for a message, from shortly before its first character outside ASCII.
pub(super) fn decoded_excerpt(text: &str) -> String {
    let first = text.find(|character: char| !character.is_ascii()).unwrap_or(0);
    // The text before `first` is ASCII.
    match first.saturating_sub(LEAD_BYTES) {
        0 => printable(text, SHOWN_BYTES),
        start => format!("…{}", printable(&text[start..], SHOWN_BYTES)),
    }
}

/// Warns, once for each file, that its encoding is a guess, with the first of `texts` that is not ASCII. Returns true if there is one.
pub(crate) fn warn_of_guess<'t>(path: &Path, encoding: TextEncoding, mut texts: impl Iterator<Item = &'t str>) -> bool {
    static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let text = if encoding.is_guess() { texts.find(|text| !text.is_ascii()) } else { None };
    if let Some(text) = text
        && WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned())
    {
        let (path, name, text) = (path.display(), encoding.name(), decoded_excerpt(text));
        tracing::warn!("{path}: read as {name}, a guess: `{text}`; save it as UTF-8 if this text is not right");
    }
    text.is_some()
}

/// Decodes a reader to UTF-8. Invalid bytes are an error after the valid text before them.
struct Utf8Reader<R> {
    inner: R,
    decoder: Decoder,
    input: Vec<u8>,
    output: Vec<u8>,
    /// The part of `output` that was not read yet.
    ready: std::ops::Range<usize>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Reading,
    Ended,
    Malformed,
}

impl<R: Read> Utf8Reader<R> {
    fn new(inner: R, encoding: TextEncoding) -> Self {
        let (decoder, output) = (encoding.decoder(), vec![0; BUFFER_BYTES]);
        Self { inner, decoder, input: Vec::new(), output, ready: 0..0, state: State::Reading }
    }

    /// Decodes the next bytes of `inner` into `output`.
    fn fill(&mut self) -> io::Result<()> {
        let start = self.input.len();
        if start < BUFFER_BYTES {
            self.input.resize(BUFFER_BYTES, 0);
            let n = self.inner.read(&mut self.input[start..])?;
            self.input.truncate(start + n);
        }
        let last = self.input.len() == start && start < BUFFER_BYTES;
        let (result, n_read, n_written) =
            self.decoder.decode_to_utf8_without_replacement(&self.input, &mut self.output, last);
        self.input.drain(..n_read);
        self.ready = 0..n_written;
        self.state = match result {
            DecoderResult::Malformed(..) => State::Malformed,
            DecoderResult::InputEmpty if last => State::Ended,
            DecoderResult::InputEmpty | DecoderResult::OutputFull => State::Reading,
        };
        Ok(())
    }
}

impl<R: Read> Read for Utf8Reader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.ready.is_empty() {
            match self.state {
                State::Reading => self.fill()?,
                State::Ended => return Ok(0),
                State::Malformed => {
                    let message = "bytes that are invalid in this encoding";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, message));
                }
            }
        }
        let n = self.ready.len().min(buffer.len());
        buffer[..n].copy_from_slice(&self.output[self.ready.start..self.ready.start + n]);
        self.ready.start += n;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use encoding_rs::UTF_16BE;

    fn read(bytes: &[u8]) -> Result<(TextEncoding, String), String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let encoding = detect(file.path()).map_err(|error| error.to_string())?;
        let mut text = String::new();
        open_text(file.path(), encoding).unwrap().read_to_string(&mut text).unwrap();
        Ok((encoding, text))
    }

    #[test]
    fn encodings_are_detected_and_decoded() {
        let text = "问题,用户画像\n鱼油怎么吃，一天几粒,𠮷先生 52岁\n";
        let (gb18030, _, lossless) = GB18030.encode(text);
        assert!(!lossless);
        let utf16 = |to_bytes: fn(u16) -> [u8; 2]| -> Vec<u8> {
            std::iter::once(0xfeff).chain(text.encode_utf16()).flat_map(to_bytes).collect()
        };
        let with_mark = [b"\xef\xbb\xbf", text.as_bytes()].concat();
        let cases = [
            (text.as_bytes(), TextEncoding::Utf8),
            (&with_mark, TextEncoding::Marked(UTF_8)),
            (&gb18030, TextEncoding::Guessed(GB18030)),
            (&utf16(u16::to_le_bytes), TextEncoding::Marked(UTF_16LE)),
            (&utf16(u16::to_be_bytes), TextEncoding::Marked(UTF_16BE)),
        ];
        for (bytes, encoding) in cases {
            assert_eq!(read(bytes), Ok((encoding, text.to_owned())));
        }
    }

    /// Symptom: tables in CP949, Big5 and Shift_JIS were read as GB18030, in which they are valid.
    #[test]
    fn east_asian_encodings_are_guessed_and_short_texts_are_gb18030() {
        let korean =
            "반품은 어떻게 하나요,p1\n빨간불이 깜박거려요,p2\n세탁기에서 물이 새요,p3\n전원이 켜지지 않아요,p4\n";
        let traditional = "洗衣機漏水怎麼辦,p1\n退貨要幾天才會收到退款,p2\n紅燈一直閃是什麼意思,p3\n保固期有多長,p4\n如何更換濾網,p5\n何時有貨,p6\n";
        let japanese = "返品はできますか,p1\n赤いランプが点滅する,p2\n洗濯機から水が漏れる,p3\n保証期間はいつまで,p4\n";
        let symbols = "→ next ■ item ● “a” — ①\n".repeat(20);
        for (encoding, text) in [
            (EUC_KR, korean),
            (BIG5, traditional),
            (SHIFT_JIS, japanese),
            (GB18030, traditional),
            (GB18030, symbols.as_str()),
        ] {
            let bytes = encoding.encode(text).0;
            assert!(GB18030.decode_without_bom_handling_and_without_replacement(&bytes).is_some());
            assert_eq!(read(&bytes), Ok((TextEncoding::Guessed(encoding), text.to_owned())));
        }
        let short = EUC_KR.encode("빨간불이 깜박거려요").0;
        assert_eq!(read(&short).unwrap().0, TextEncoding::Guessed(GB18030));
        assert_eq!(TextEncoding::Guessed(EUC_KR).name(), "EUC-KR/CP949");
        let warns = |encoding, text: &str| warn_of_guess(Path::new("a.txt"), encoding, text.lines());
        assert!(warns(TextEncoding::Guessed(BIG5), "p1\n洗衣機"));
        assert!(!warns(TextEncoding::Guessed(BIG5), "p1") && !warns(TextEncoding::Utf8, "洗衣機"));
    }

    /// Symptom: a table of German Excel that is valid GB18030 was read as `Geb黨ren f黵 F黨rerscheine`.
    #[test]
    fn western_words_that_are_valid_gb18030_are_windows_1252() {
        let german = "id,text\na,Die Gebühren für Führerscheine\nb,Öffnungszeiten und Größe der ÄMTER\n";
        // Symptom of `€`: with it, German was read as GB18030.
        let euros = "id,text,fee\na,Die Gebühren für Führerscheine,5 €\nb,Öffnungszeiten,€€€\n";
        for text in [german, euros, "a,Les fenêtres créées près du château\n"] {
            let bytes = WINDOWS_1252.encode(text).0;
            assert!(GB18030.decode_without_bom_handling_and_without_replacement(&bytes).is_some());
            assert_eq!(read(&bytes), Ok((TextEncoding::Guessed(WINDOWS_1252), text.to_owned())));
        }
        assert_eq!(TextEncoding::Guessed(WINDOWS_1252).name(), "windows-1252");
        let mixed = "id,text\na,VC泡腾片 how to use\nb,USB-C接口\n";
        for text in [mixed, "T恤,p1\n", "U盘,p2\n", "A股,p3\n", "x光,p4\n", "K歌,p5\n", "iPhone壳 black\n"] {
            assert_eq!(read(&GB18030.encode(text).0), Ok((TextEncoding::Guessed(GB18030), text.to_owned())));
        }
        for text in ["问题,价格\n鱼油,5 €\n", "T恤,5 €\n", "€5,p1\n", "price,5 €"] {
            // As CP936 has it: one byte.
            let bytes: Vec<Vec<u8>> = text.split('€').map(|part| GB18030.encode(part).0.into_owned()).collect();
            assert_eq!(read(&bytes.join(&EURO)), Ok((TextEncoding::Guessed(GB18030), text.to_owned())));
        }
        // A Chinese character anywhere decides.
        let one = [&WINDOWS_1252.encode(german).0[..], &GB18030.encode("c,问题\n").0].concat();
        assert_eq!(read(&one).unwrap().0, TextEncoding::Guessed(GB18030));
    }

    /// Symptom: the message about a guessed encoding showed the start of a long cell, where nothing was wrong.
    #[test]
    fn an_excerpt_begins_shortly_before_the_first_decoded_character() {
        let text = format!("{}geb黨ren und so weiter", "a".repeat(100));
        assert_eq!(decoded_excerpt(&text), format!("…{}geb黨ren und so weiter", "a".repeat(27)));
        assert_eq!(decoded_excerpt("f黵"), "f黵");
        assert_eq!(decoded_excerpt("plain"), "plain");
    }

    #[test]
    fn long_text_is_decoded_across_buffers() {
        let text = "一二三a".repeat(60_000);
        assert_eq!(read(&GB18030.encode(&text).0), Ok((TextEncoding::Guessed(GB18030), text)));
    }

    /// Regression: a file over the limit was reported as invalid UTF-8.
    #[test]
    fn a_limit_within_a_character_is_reported_as_the_limit() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "鱼油").unwrap();
        assert_eq!(read_text_up_to(file.path(), 6).unwrap(), "鱼油");
        let message = read_text_up_to(file.path(), 4).unwrap_err().to_string();
        assert!(message.ends_with("the file has more than 4 bytes; leave out what is not needed"), "{message}");
    }

    /// Regression: a damaged UTF-8 file was read as GB18030.
    #[test]
    fn damaged_utf8_is_an_error_with_its_line_and_not_read_as_gb18030() {
        let mut bytes = "问题\n深海鱼油软胶囊一天几粒，怎么吃\n益生菌".as_bytes().to_vec();
        bytes.truncate(bytes.len() - 1);
        let message = read(&bytes).unwrap_err();
        let expected = ":3: a character is not UTF-8, as those before it are; save the file again as UTF-8";
        assert!(message.ends_with(expected), "{message}");
        // Few characters, the last one truncated.
        let message = read(&"q,鱼油\n".as_bytes()[..7]).unwrap_err();
        assert!(message.contains(":1: a character is not UTF-8, as those before it are"), "{message}");
        let message = read(b"a\nb\xff\xff\n").unwrap_err();
        let expected = ":2: a character is not UTF-8 or GB18030; save the file again as UTF-8";
        assert!(message.ends_with(expected), "{message}");
    }
}
