//! Texts that trip up code which takes texts to be short, in one script, or not empty.

/// Characters of 3 bytes each: about 100 kB.
const LONG_CHARS: usize = 34_000;

/// A name and a text each; none is longer than a few dozen bytes, see [`long`].
pub(crate) fn odd() -> Vec<(&'static str, &'static str)> {
    vec![
        ("empty", ""),
        ("space", " "),
        ("whitespace", " \t\r\n\u{a0}\u{3000}"),
        ("one-character", "吃"),
        ("emoji", "👨‍👩‍👧‍👦能一起喝🍵吗❤️🇨🇳"),
        ("combining", "e\u{301}\u{327} ﾊﾟ か\u{3099} ก\u{e33}"),
        ("right-to-left", "كيف أتناول \u{202e}الكولاجين\u{202c}؟"),
        ("zero-width", "胶\u{200b}原\u{200d}蛋\u{2060}白\u{feff}"),
        ("nul", "胶原\0蛋白\0"),
        ("control", "\u{1}\u{7f}\u{85}\u{1b}[31m"),
        ("extension-b", "𠀀𪛖𫝀𬺰𰀀"),
        ("beside-surrogates", "\u{d7ff}\u{e000}\u{fffd}\u{ffff}\u{10000}\u{10ffff}"),
        ("full-width", "ＤＨＡ　１００％（進口）"),
        ("json", "{\"rewritten_query\": \"胶原\", \"x\": [1, null]}"),
        ("markup", "<think>想</think>```json\n```\"'\\"),
        ("number", "-1e999"),
        ("not-a-number", "NaN"),
    ]
}

/// About 100 kB of a question.
pub(crate) fn long() -> String {
    "胶原蛋白肽和虾青素可以一起吃吗？".chars().cycle().take(LONG_CHARS).collect()
}
