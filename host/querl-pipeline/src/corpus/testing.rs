//! Helpers of the tests of this module.

use querl_core::config::{Language, RetrievalConfig};
use querl_data::{Passage, WordSegmenter};

/// The word segmenter of a configuration with this language.
pub(super) fn segmenter(language: Language) -> WordSegmenter {
    let config: RetrievalConfig = toml::from_str("kind = 'embedded'").unwrap();
    WordSegmenter::open(&RetrievalConfig { language, ..config }).unwrap()
}

/// Passages with these titles and texts.
pub(super) fn passages(texts: &[(&str, &str)]) -> Vec<Passage> {
    let passage = |(number, (title, text)): (usize, &(&str, &str))| Passage {
        id: format!("p{number}"),
        title: (*title).to_owned(),
        text: (*text).to_owned(),
    };
    texts.iter().enumerate().map(passage).collect()
}

pub(super) const APPLIANCES: &[(&str, &str)] = &[
    (
        "AquaLine 60: cleaning the filter",
        "Residue on crockery indicates a saturated triple filter. Rinse all stages under running water.",
    ),
    (
        "AquaLine 60: fault code E15",
        "The anti-flood float detects water in the base pan. Close the tap and drain the pan.",
    ),
    (
        "BreezeMax 9: replacing the cartridge",
        "The carbon cartridge lasts about six months. Order the spare part from any dealer.",
    ),
    (
        "BreezeMax 9: noise at night",
        "A humming compressor is normal below forty decibels. Level the feet of the housing.",
    ),
];
