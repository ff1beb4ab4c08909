//! Synthetic conversations of the inverse cloze task: the query is words of a sentence of a passage, the rewrite is the passage's title and
//! rare words of the sentence.
//!
//! Source: Lee et al. 2019, "Latent Retrieval for Weakly Supervised Open Domain Question Answering", section 4, where the sentence is the query
//! and the passage without it the evidence. Departures: a run of the sentence's words in place of all of them, a question word, an entity that
//! is named in the query, in part or in the history alone, and a rewrite as the target.

use super::entities::{entities, topic};
use super::passages::sentences;
use super::phrases::{ENTITY, OTHER, Phrases};
use querl_core::config::Language;
use querl_data::{Passage, WordSegmenter, is_mostly_traditional};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;

/// Number of words of a query, for languages with spaces, and for languages without, whose words are segmented.
const QUERY_WORDS_SPACED: RangeInclusive<usize> = 3..=9;
const QUERY_WORDS_UNSPACED: RangeInclusive<usize> = 2..=6;
/// Share of queries that lose words, and the share of their words that is kept.
const SHORTENED: f64 = 0.5;
const STAYING: f64 = 0.8;
/// Share of queries with a question word.
const ASKING: f64 = 0.75;
/// Share of targets that consist of rare words only, and their number of words: users find a passage by its details, too.
const BY_DETAILS: f64 = 0.25;
const N_DETAILS: usize = 4;
/// Probability that an entity is invented, and that a word or number of an invented one is replaced: a model that sees the same twenty
/// names repeatedly memorises them instead of learning to copy.
const INVENTED: f64 = 0.5;
const REPLACED: f64 = 0.7;
/// Maximum number of rare words after the words of a title.
const MAX_RARE_WORDS: usize = 3;
/// Minimum length of a rare word; shorter ones are particles or letters.
const MIN_RARE_CHARS: usize = 2;

/// A synthetic query with its history and the target rewrite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Conversation {
    pub(super) query: String,
    /// History summary; empty if the conversation has no earlier turns.
    pub(super) history: String,
    /// Target rewrite; at least one word.
    pub(super) target: String,
}

/// Generator of random conversations from passages.
pub(super) struct ConversationGenerator<'a> {
    segmenter: &'a WordSegmenter,
    phrases: Phrases,
    sources: Vec<ConversationSource>,
    /// Entities of the passages, without duplicates, in order.
    entities: Vec<String>,
    /// Words of the passages as they are written, each once, in order: invented entities consist of them.
    vocabulary: Vec<String>,
    /// Number of passages with a word, by its stem.
    frequencies: HashMap<String, usize>,
}

/// A passage with at least one sentence that has a word.
struct ConversationSource {
    title: String,
    entity: Option<String>,
    topic: String,
    sentences: Vec<String>,
}

impl<'a> ConversationGenerator<'a> {
    pub(super) fn new(passages: &[Passage], segmenter: &'a WordSegmenter) -> Self {
        let texts = || passages.iter().flat_map(|passage| [passage.title.as_str(), passage.text.as_str()]);
        let phrases = match segmenter.language() {
            Language::Zh if is_mostly_traditional(texts()) => Phrases::TRADITIONAL,
            language => Phrases::of(language),
        };
        let titles: Vec<&str> = passages.iter().map(|passage| passage.title.trim()).collect();
        let of_titles = entities(&titles, segmenter, &phrases);
        let mut frequencies: HashMap<String, usize> = HashMap::new();
        for passage in passages {
            let words: HashSet<String> = segmenter.words(&passage.full_text()).into_iter().collect();
            words.into_iter().for_each(|word| *frequencies.entry(word).or_default() += 1);
        }
        let mut names: Vec<String> = of_titles.iter().flatten().cloned().collect();
        names.sort_unstable();
        names.dedup();
        let of_texts = passages.iter().flat_map(|passage| words(segmenter, &passage.text));
        let is_name = |word: &&str| word.chars().count() >= MIN_RARE_CHARS && word.chars().all(char::is_alphabetic);
        let mut vocabulary: Vec<String> = of_texts.filter(is_name).map(str::to_owned).collect();
        vocabulary.sort_unstable();
        vocabulary.dedup();
        let source = |((passage, title), entity): ((&Passage, &&str), Option<String>)| {
            let has_word = |sentence: &&str| !words(segmenter, sentence).is_empty();
            let sentences: Vec<String> =
                sentences(&passage.text).into_iter().filter(has_word).map(str::to_owned).collect();
            let topic = topic(title, entity.as_deref()).to_owned();
            let title = (*title).to_owned();
            (!sentences.is_empty()).then_some(ConversationSource { title, entity, topic, sentences })
        };
        let sources = passages.iter().zip(&titles).zip(of_titles).filter_map(source).collect();
        Self { segmenter, phrases, sources, entities: names, vocabulary, frequencies }
    }

    /// Whether no passage has a sentence with a word, so that no conversation can be drawn.
    pub(super) fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// A conversation about a random sentence of a random passage. [`is_empty`](Self::is_empty) must be false.
    pub(super) fn draw(&self, rng: &mut ChaCha8Rng) -> Conversation {
        let source = pick(&self.sources, rng);
        let sentence: &String = pick(&source.sentences, rng);
        let words = words(self.segmenter, sentence);
        let is_invented = source.entity.is_some() && rng.random_bool(INVENTED);
        let entity = source.entity.as_deref().map(|entity| match is_invented {
            true => self.invented(entity, rng),
            false => entity.to_owned(),
        });
        // The passage's own entity must not occur together with an invented one.
        let real = source.entity.as_deref().filter(|_| is_invented).unwrap_or_default();
        let own = self.segmenter.words(real);
        let is_foreign = |word: &&&str| !self.segmenter.words(word).iter().any(|stem| own.contains(stem));
        let foreign: Vec<&str> = words.iter().filter(is_foreign).copied().collect();
        let words = if foreign.is_empty() { words } else { foreign };
        let query_words = self.query_words(&words, rng);
        let (mention, history) = match &entity {
            Some(entity) => self.mention(entity, rng),
            None => (None, String::new()),
        };
        let clozed = self.join(query_words.iter().copied());
        let query = self.ask(&self.join(mention.as_deref().into_iter().chain([clozed.as_str()])), rng);
        // An invented name cannot be known, so the target contains only the part of it that the prompt contains. Which real entity a text
        // is about can be learned.
        let is_known = !history.is_empty() || entity == source.entity;
        let named = if is_known { &entity } else { &mention };
        let target = self.target(source, named.as_deref(), &words, rng).unwrap_or(clozed);
        Conversation { query, history, target }
    }

    /// An entity of the same form with other words and numbers.
    fn invented(&self, entity: &str, rng: &mut ChaCha8Rng) -> String {
        let other = |piece: &str, rng: &mut ChaCha8Rng| -> String {
            let digit = |rng: &mut ChaCha8Rng| char::from(b'0' + rng.random_range(0..10_u8));
            if piece.chars().all(|character| character.is_ascii_digit()) {
                return piece.chars().map(|_| digit(rng)).collect();
            }
            let word = pick(&self.vocabulary, rng);
            let is_capital = piece.chars().next().is_some_and(char::is_uppercase);
            let mut characters = word.chars();
            match characters.next().filter(|_| is_capital) {
                Some(first) => first.to_uppercase().chain(characters).collect(),
                None => word.clone(),
            }
        };
        let invent = |piece: &str| {
            let is_word = piece.chars().any(char::is_alphanumeric) && !self.vocabulary.is_empty();
            if is_word && rng.random_bool(REPLACED) { other(piece, rng) } else { piece.to_owned() }
        };
        self.segmenter.pieces(entity).into_iter().map(invent).collect()
    }

    /// A run of consecutive words of a sentence; half of the queries lack some of them.
    fn query_words<'w>(&self, words: &[&'w str], rng: &mut ChaCha8Rng) -> Vec<&'w str> {
        let lengths = if self.segmenter.is_spaced() { QUERY_WORDS_SPACED } else { QUERY_WORDS_UNSPACED };
        let run = random_run(words, lengths, rng);
        if !rng.random_bool(SHORTENED) {
            return run;
        }
        let staying: Vec<&str> = run.iter().copied().filter(|_| rng.random_bool(STAYING)).collect();
        if staying.is_empty() { run } else { staying }
    }

    /// How the query names its entity (completely, in part, not at all), and a history that names it where the query does not.
    fn mention(&self, entity: &str, rng: &mut ChaCha8Rng) -> (Option<String>, String) {
        match rng.random_range(0..20_u32) {
            0..7 => (None, self.history(entity, rng)),
            7..12 => (Some(entity.to_owned()), String::new()),
            12..16 => {
                let words = words(self.segmenter, entity);
                let most = words.len().saturating_sub(1).max(1);
                (Some(self.join(random_run(&words, 1..=most, rng))), String::new())
            }
            _ => (None, String::new()),
        }
    }

    fn history(&self, entity: &str, rng: &mut ChaCha8Rng) -> String {
        // Entities are each once, in order.
        let own = self.entities.binary_search_by(|other| other.as_str().cmp(entity)).ok();
        let n_others = self.entities.len() - usize::from(own.is_some());
        let usable = self.phrases.histories.iter().filter(|history| n_others > 0 || !history.contains(OTHER));
        let histories: Vec<&str> = usable.copied().collect();
        let history = *pick(&histories, rng);
        let other = if history.contains(OTHER) {
            let index = rng.random_range(0..n_others);
            self.entities[index + usize::from(own.is_some_and(|own| index >= own))].as_str()
        } else {
            ""
        };
        history.replace(OTHER, other).replace(ENTITY, entity)
    }

    /// Adds a question word to most queries. Users write languages with spaces in lower case.
    fn ask(&self, text: &str, rng: &mut ChaCha8Rng) -> String {
        let Phrases { before, after, .. } = self.phrases;
        let n_phrases = before.len() + after.len();
        let query = match n_phrases > 0 && rng.random_bool(ASKING) {
            false => text.to_owned(),
            true => match rng.random_range(0..n_phrases) {
                index if index < before.len() => self.join([before[index], text]),
                index => self.join([text, after[index - before.len()]]),
            },
        };
        if self.segmenter.is_spaced() { query.to_lowercase() } else { query }
    }

    /// Words of the title and up to three rare ones of the sentence; of a quarter of the targets the entity and rare words alone. `None` for a
    /// passage without title and rare words.
    fn target(
        &self,
        source: &ConversationSource,
        entity: Option<&str>,
        words: &[&str],
        rng: &mut ChaCha8Rng,
    ) -> Option<String> {
        let rare = self.rarest(words, &source.title);
        let by_details = rng.random_bool(BY_DETAILS);
        let n_behind_title = rng.random_range(0..=MAX_RARE_WORDS);
        let topic = Some(source.topic.as_str()).filter(|topic| !topic.is_empty());
        let has_title = entity.is_some() || topic.is_some();
        let (title, n_rare) = match !rare.is_empty() && (by_details || !has_title) {
            true => ([entity, None], N_DETAILS),
            false => ([entity, topic], n_behind_title),
        };
        let parts: Vec<&str> = title.into_iter().flatten().chain(rare.into_iter().take(n_rare)).collect();
        (!parts.is_empty()).then(|| parts.join(" "))
    }

    /// The words of a sentence that the title lacks, each once, those of the fewest passages first.
    fn rarest<'w>(&self, words: &[&'w str], title: &str) -> Vec<&'w str> {
        let mut seen: HashSet<String> = self.segmenter.words(title).into_iter().collect();
        let mut rare: Vec<(f64, &str)> = Vec::new();
        for word in words.iter().copied().filter(|word| word.chars().count() >= MIN_RARE_CHARS) {
            let stems = self.segmenter.words(word);
            let n_passages: usize = stems.iter().map(|stem| self.frequencies.get(stem).copied().unwrap_or(0)).sum();
            let frequency = n_passages as f64 / stems.len().max(1) as f64;
            let is_new = stems.iter().any(|stem| !seen.contains(stem));
            seen.extend(stems);
            if is_new {
                rare.push((frequency, word));
            }
        }
        // Stable sort: equally rare words keep their order in the sentence.
        rare.sort_by(|one, other| one.0.total_cmp(&other.0));
        rare.into_iter().map(|(_, word)| word).collect()
    }

    /// Joins words to a text. In languages without spaces, only Latin letters and digits are separated.
    fn join<'w>(&self, words: impl IntoIterator<Item = &'w str>) -> String {
        let is_latin = |character: Option<char>| character.is_some_and(|character| character.is_ascii_alphanumeric());
        let mut text = String::new();
        for word in words {
            let touches = is_latin(text.chars().next_back()) && is_latin(word.chars().next());
            if !text.is_empty() && (self.segmenter.is_spaced() || touches) {
                text.push(' ');
            }
            text.push_str(word);
        }
        text
    }
}

/// The words of a text in their original spelling, without the text between them.
fn words<'t>(segmenter: &WordSegmenter, text: &'t str) -> Vec<&'t str> {
    let pieces = segmenter.pieces(text).into_iter();
    pieces.filter(|piece| piece.chars().any(char::is_alphanumeric)).collect()
}

/// A random item; `items` must not be empty.
fn pick<'t, T>(items: &'t [T], rng: &mut ChaCha8Rng) -> &'t T {
    &items[rng.random_range(0..items.len())]
}

/// A random run of consecutive items, with one of `lengths`, or all items.
fn random_run<'t>(items: &[&'t str], lengths: RangeInclusive<usize>, rng: &mut ChaCha8Rng) -> Vec<&'t str> {
    let n = rng.random_range(lengths).min(items.len());
    let start = rng.random_range(0..=items.len() - n);
    items[start..start + n].to_vec()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{APPLIANCES, passages, segmenter};
    use super::*;
    use rand::SeedableRng;

    fn drawn(language: Language, texts: &[(&str, &str)], n: usize, seed: u64) -> Vec<Conversation> {
        let segmenter = segmenter(language);
        let generator = ConversationGenerator::new(&passages(texts), &segmenter);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (0..n).map(|_| generator.draw(&mut rng)).collect()
    }

    fn is_real(conversation: &&Conversation) -> bool {
        let target = &conversation.target;
        target.starts_with("AquaLine 60 ") || target.starts_with("BreezeMax 9 ")
    }

    #[test]
    fn queries_have_words_of_the_passages_and_targets_those_of_a_title() {
        let all: String = APPLIANCES.iter().map(|(title, text)| format!("{title} {text} ")).collect();
        let asked: String = Phrases::of(Language::En).before.join(" ");
        let known: HashSet<String> = segmenter(Language::En).words(&format!("{all} {asked}")).into_iter().collect();
        let conversations = drawn(Language::En, APPLIANCES, 600, 1);
        let real: Vec<&Conversation> = conversations.iter().filter(is_real).collect();
        assert!(
            (300..450).contains(&real.len()),
            "half, and invented ones that have all words of a real one: {}",
            real.len()
        );
        for Conversation { query, target, .. } in real {
            let stems = segmenter(Language::En).words(&format!("{query} {target}"));
            assert!(stems.iter().all(|stem| known.contains(stem)), "{query} -> {target}");
            assert_eq!(*query, query.to_lowercase());
        }
        let n_titles = conversations.iter().filter(|one| one.target.contains("fault code E15")).count();
        assert!(
            (60..180).contains(&n_titles),
            "a quarter of the passages, three quarters of them by title: {n_titles}"
        );
    }

    #[test]
    fn the_entity_is_named_in_the_query_in_part_or_in_the_history_alone() {
        let conversations = drawn(Language::En, APPLIANCES, 600, 2);
        let real: Vec<&Conversation> = conversations.iter().filter(is_real).collect();
        let of = |is: fn(&Conversation) -> bool| real.iter().filter(|one| is(one)).count();
        let names = |text: &str| text.contains("aqualine 60") || text.contains("breezemax 9");
        let whole = real.iter().filter(|one| names(&one.query)).count();
        let part = of(|one| {
            let text = &one.query;
            (text.contains("aqualine") && !text.contains("aqualine 60"))
                || (text.contains("breezemax") && !text.contains("breezemax 9"))
        });
        let history = of(|one| !one.history.is_empty());
        assert!(whole > 40 && part > 10 && history > 60, "{whole} {part} {history}");
        for one in conversations.iter().filter(|one| !one.history.is_empty()) {
            assert!(!names(&one.query), "{one:?}");
            assert!(!one.history.contains(ENTITY) && !one.history.contains(OTHER), "{one:?}");
        }
    }

    #[test]
    fn invented_entities_of_targets_stand_in_the_history() {
        let conversations = drawn(Language::En, APPLIANCES, 600, 3);
        let invented = conversations.iter().filter(|one| !is_real(one) && !one.history.is_empty());
        let mut names = HashSet::new();
        for Conversation { query, history, target } in invented {
            let name: Vec<&str> = target.split(' ').take(2).collect();
            assert!(history.contains(&name.join(" ")), "{history} -> {target}");
            assert!(!query.contains("aqualine") && !query.contains("breezemax"), "{query}");
            names.insert(name.join(" "));
        }
        assert!(names.len() > 30, "{names:?}");
    }

    /// Symptom: a tenth of the targets began with an invented name that neither query nor history had.
    #[test]
    fn targets_have_no_invented_entity_that_the_prompt_lacks() {
        let topics = APPLIANCES.iter().filter_map(|(title, _)| title.split_once(": ")).map(|(_, topic)| topic);
        let topics: Vec<&str> = topics.collect();
        let conversations = drawn(Language::En, APPLIANCES, 600, 5);
        let is_invented = |name: &str| !["", "AquaLine 60", "BreezeMax 9"].contains(&name);
        let mut n_invented = 0;
        for one in &conversations {
            for (name, _) in topics.iter().filter_map(|topic| one.target.split_once(topic)) {
                let prompt = format!("{} {}", one.query, one.history).to_lowercase();
                assert!(!is_invented(name.trim()) || prompt.contains(&name.trim().to_lowercase()), "{one:?}");
                n_invented += usize::from(is_invented(name.trim()));
            }
        }
        assert!(n_invented > 60, "{n_invented}");
    }

    #[test]
    fn chinese_queries_are_runs_of_words_without_spaces() {
        let texts = [
            ("畅享59套餐资费标准", "畅享59套餐月基本费59元，内含国内通用流量30GB。被叫免费。"),
            ("畅享59套餐办理条件", "个人客户凭本人有效身份证件均可办理，同一证件下最多登记5个号码。"),
            ("国际漫游", "漫游期间按流量计费，关闭数据开关即可停用。"),
        ];
        let conversations = drawn(Language::Zh, &texts, 200, 3);
        let asks = ["怎么", "请问", "吗", "是什么"];
        assert!(conversations.iter().filter(|one| asks.iter().any(|ask| one.query.contains(ask))).count() > 20);
        assert!(conversations.iter().any(|one| one.history.contains("畅享59套餐")));
        for Conversation { query, target, .. } in &conversations {
            let spaces = query.split(' ').collect::<Vec<_>>();
            let between_latin = |pair: &[&str]| {
                pair[0].ends_with(|c: char| c.is_ascii_alphanumeric())
                    && pair[1].starts_with(|c: char| c.is_ascii_alphanumeric())
            };
            assert!(spaces.windows(2).all(between_latin), "{query}");
            assert!(!target.is_empty());
        }
    }

    /// Symptom: Simplified question words in a corpus of Traditional passages.
    #[test]
    fn traditional_passages_have_traditional_question_words() {
        let texts = [
            ("暢享59套餐資費標準", "暢享59套餐月基本費59元，內含國內通用流量30GB。"),
            ("暢享59套餐辦理條件", "個人客戶憑本人有效身分證件均可辦理。"),
        ];
        let conversations = drawn(Language::Zh, &texts, 200, 3);
        let have = |text: &str| conversations.iter().any(|one| one.query.contains(text) || one.history.contains(text));
        assert!(have("怎麼") && have("嗎") && have("諮詢"), "{conversations:?}");
        assert!(!["怎么", "请问", "什么", "吗", "咨询", "办理"].into_iter().any(have), "{conversations:?}");
    }

    #[test]
    fn rare_words_are_those_of_the_fewest_passages_that_the_title_lacks() {
        let segmenter = segmenter(Language::En);
        let texts =
            [("Salt", "Refill the salt container monthly"), ("Water", "Refill the container"), ("Tap", "The tap")];
        let generator = ConversationGenerator::new(&passages(&texts), &segmenter);
        let found = generator.rarest(&["Refill", "the", "salt", "container", "monthly", "monthly"], "Salt");
        assert_eq!(found, ["monthly", "Refill", "container", "the"]);
    }

    #[test]
    fn passages_without_titles_have_rare_words_as_targets() {
        let texts = [("", "The carbon cartridge lasts six months."), ("", "Level the feet of the housing. ★")];
        for Conversation { query, target, history } in drawn(Language::En, &texts, 50, 4) {
            assert!(!query.is_empty() && !target.is_empty() && history.is_empty(), "{query} -> {target}");
            assert!(target.split(' ').count() <= N_DETAILS, "{target}");
        }
        let segmenter = segmenter(Language::En);
        assert!(ConversationGenerator::new(&passages(&[("", "★ ★")]), &segmenter).is_empty());
    }

    #[test]
    fn the_seed_decides_the_conversations() {
        let of = |seed| drawn(Language::En, APPLIANCES, 50, seed);
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }
}
