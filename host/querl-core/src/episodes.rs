//! Reads recorded episodes: JSON lines written by a run or by a plugin author.

use crate::fsx::{fault, io_problem};
use crate::records::{Episode, EpisodeRecord, HostCall, RejectedBy, Rejection, Reward, outcome_form};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Maximum length of a line in bytes.
pub const MAX_LINE_BYTES: usize = 16 << 20;

/// An episode with its recorded score.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedEpisode {
    /// 1-based line in the file.
    pub line: usize,
    /// Training step of the rollout; 0 if unknown.
    pub step: u64,
    /// The input of the reward.
    pub episode: Episode,
    /// Recorded calls into host functions.
    pub calls: Vec<HostCall>,
    /// The score, or why the episode was dropped; `None` if the file has no outcome.
    pub outcome: Option<Result<Reward, Rejection>>,
}

impl RecordedEpisode {
    /// True if the host rejected the episode before it was scored: the other episodes of its group were scored without it.
    pub fn is_left_out(&self) -> bool {
        matches!(&self.outcome, Some(Err(rejection)) if rejection.by == RejectedBy::Host)
    }
}

/// Errors of [`read`]. `line` is 1-based.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EpisodesError {
    #[error("{}: cannot be read: {}", path.display(), io_problem(source))]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}:{line}: {reason}", path.display())]
    Line { path: PathBuf, line: usize, reason: String },
}

/// Reads a file of episodes in line order and skips empty lines.
///
/// # Errors
/// The file cannot be read; a line is not an episode, has another format version or a number out of range, or repeats an id.
pub fn read(path: &Path) -> Result<Vec<RecordedEpisode>, EpisodesError> {
    let io = |source| EpisodesError::Io { path: path.to_owned(), source };
    let mut reader = BufReader::new(std::fs::File::open(path).map_err(io)?);
    let (mut episodes, mut ids, mut bytes) = (Vec::new(), BTreeSet::new(), Vec::new());
    for line in 1.. {
        bytes.clear();
        let n_read = reader.by_ref().take(MAX_LINE_BYTES as u64 + 1).read_until(b'\n', &mut bytes).map_err(io)?;
        if n_read == 0 {
            break;
        }
        let refused = |reason: String| EpisodesError::Line { path: path.to_owned(), line, reason };
        let Some(episode) = parse(&bytes, line).map_err(refused)? else { continue };
        if !ids.insert(episode.episode.id.clone()) {
            return Err(refused(format!(
                "the id `{}` is that of an earlier line; expected unique ids",
                episode.episode.id
            )));
        }
        episodes.push(episode);
    }
    Ok(episodes)
}

/// Parses one line, whose 1-based number is `line`; `None` if it is blank.
///
/// # Errors
/// A sentence with the expected and the actual value.
pub fn parse(bytes: &[u8], line: usize) -> Result<Option<RecordedEpisode>, String> {
    #[derive(Deserialize)]
    struct Format {
        format: Option<u32>,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Line {
        #[serde(rename = "format")]
        _format: u32,
        #[serde(default)]
        step: u64,
        episode: Episode,
        #[serde(default)]
        calls: Vec<HostCall>,
        #[serde(default, deserialize_with = "outcome_form::optional")]
        outcome: Option<Result<Reward, Rejection>>,
    }
    if bytes.len() > MAX_LINE_BYTES {
        return Err(format!("the line has more than {MAX_LINE_BYTES} bytes"));
    }
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    let remedy = "correct or remove the line, or run the stage `rl` again";
    let not_json = |error: serde_json::Error| format!("not an episode: {}; {remedy}", fault(bytes, &error));
    let known = EpisodeRecord::FORMAT;
    let format = match serde_json::from_slice::<Format>(bytes).map_err(not_json)?.format {
        Some(format) if format == known || format == FORMAT_2 => format,
        Some(format) => {
            let newer = if format > known { "run the querl that wrote it, or " } else { "" };
            return Err(format!(
                "`format` is {format}; this querl reads {FORMAT_2} and {known}: {newer}run the stage `rl` again"
            ));
        }
        None => return Err(format!("`format` is missing; expected \"format\": {known}")),
    };
    let Line { step, mut episode, calls, outcome, .. } = serde_json::from_slice(bytes).map_err(not_json)?;
    complete(&mut episode, format, step, line);
    check(&episode)?;
    Ok(Some(RecordedEpisode { line, step, episode, calls, outcome }))
}

const FORMAT_2: u32 = 2;

/// Fills in missing fields: the id (`line-N`), and group and sample from an id `GROUP/INDEX`. In format 2, a missing retrieval means that
/// nothing was found, and ids of rollouts contain the step.
fn complete(episode: &mut Episode, format: u32, step: u64, line: usize) {
    if episode.id.is_empty() {
        episode.id = format!("line-{line}");
    }
    if episode.group_id.is_empty() {
        let (group, index) = Episode::group_of(&episode.id);
        (episode.group_id, episode.sample_index) = (group.to_owned(), index);
    }
    if format == FORMAT_2 {
        if episode.id.starts_with("step-") || episode.id.starts_with("val-") {
            episode.step = Some(step);
        }
        for candidate in std::iter::once(&mut episode.policy).chain(&mut episode.baseline) {
            candidate.retrieval.get_or_insert_with(|| Ok(Vec::new()));
        }
    }
}

/// Adds the id, group and sample index that an episode written by hand may leave out, and checks its numbers, as if it were line
/// `index + 1` of a file.
///
/// # Errors
/// A sentence with the expected and the actual value.
pub fn complete_and_check(episode: &mut Episode, index: usize) -> Result<(), String> {
    complete(episode, EpisodeRecord::FORMAT, 0, index + 1);
    check(episode)
}

/// Checks the numeric ranges that the plugin contract guarantees.
fn check(episode: &Episode) -> Result<(), String> {
    for (side, candidate) in episode.candidates() {
        for (index, hit) in candidate.hits().iter().enumerate() {
            let score = hit.reranker_score;
            if !(0.0..=1.0).contains(&score) {
                return Err(format!("`reranker_score` of {side} hit {} is {score}; expected 0 to 1", index + 1));
            }
            if hit.rank as usize != index + 1 {
                return Err(format!("`rank` of {side} hit {} is {}; expected {}", index + 1, hit.rank, index + 1));
            }
        }
        if let Some(score) = candidate.judgement.score().filter(|score| !(0.0..=5.0).contains(score)) {
            return Err(format!("`score` of the {side} judgement is {score}; expected 0 to 5"));
        }
        if let Some(style) = &candidate.style {
            let sum: f64 = style.iter().map(|class| class.probability).sum();
            if sum.is_nan() || (sum - 1.0).abs() > 1e-6 {
                return Err(format!("the {side} `style` sums to {sum}; expected 1"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::{FinishReason, HostRequest, HostResponse};

    const BY_HAND: &str = r#"{"format": 2, "episode": {"id": "a", "query": "一天几粒啊",
        "policy": {"rewrite": "深海鱼油 食用方法", "retrieval": {"hits": [{"reranker_score": 0.8}, {"reranker_score": 0.5}]}},
        "baseline": {"rewrite": "鱼油", "retrieval": {"failed": {"kind": "timeout", "message": "late"}}}}}"#;

    fn one_line(text: &str) -> String {
        text.replace('\n', " ")
    }

    #[test]
    fn handwritten_episode_needs_only_required_fields() {
        let read = parse(one_line(BY_HAND).as_bytes(), 1).unwrap().unwrap();
        let hits = read.episode.policy.hits();
        assert_eq!(hits.iter().map(|hit| hit.rank).collect::<Vec<_>>(), [1, 2]);
        let baseline = read.episode.baseline.unwrap();
        assert!(matches!(baseline.retrieval, Some(Err(_))) && read.outcome.is_none());
    }

    /// Written by a run of an earlier version.
    #[test]
    fn episodes_of_format_2_have_group_sample_step_and_finish_reason() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/episodes/format-2.jsonl");
        let episodes: Vec<Episode> = read(&path).unwrap().into_iter().map(|recorded| recorded.episode).collect();
        for episode in &episodes {
            assert_eq!(episode.id, format!("{}/{}", episode.group_id, episode.sample_index));
            assert!(episode.group_id.starts_with(&format!(
                "{}-{:06}/",
                if episode.id.starts_with("val") { "val" } else { "step" },
                episode.step.unwrap()
            )));
            assert_eq!(episode.candidates().count(), 2);
            assert!(episode.candidates().all(|(_, side)| side.retrieval.is_some()));
            assert!(episode.response.is_none() && episode.prompt.is_none() && episode.split.is_none());
        }
        let ends: Vec<_> = episodes.iter().map(|episode| episode.policy.finish_reason.clone()).collect();
        assert!(ends.contains(&Some(FinishReason::Stop)) && ends.contains(&Some(FinishReason::Length)), "{ends:?}");
    }

    #[test]
    fn record_round_trips() {
        let episode = parse(one_line(BY_HAND).as_bytes(), 1).unwrap().unwrap().episode;
        for outcome in [
            Ok(Reward { total: 0.5, components: Vec::new() }),
            Err(Rejection::new("policy_retrieval_failed", "")),
            Err(Rejection::by_host("policy_retrieval_failed", "")),
        ] {
            let calls = vec![HostCall {
                plugin: "p".into(),
                request: HostRequest::CountTokens("鱼油".into()),
                response: Ok(HostResponse::Count(2)),
            }];
            let format = EpisodeRecord::FORMAT;
            let record = EpisodeRecord { format, step: 3, episode: episode.clone(), calls, outcome };
            let text = serde_json::to_vec(&record).unwrap();
            assert_eq!(serde_json::from_slice::<EpisodeRecord>(&text).unwrap(), record);
            let read = parse(&text, 7).unwrap().unwrap();
            assert_eq!((read.line, read.step, read.outcome), (7, 3, Some(record.outcome)));
        }
    }

    #[test]
    fn rejections_say_who_rejected_and_those_of_earlier_versions_by_their_code() {
        let left_out = |rejected: &str| {
            let line = one_line(BY_HAND);
            let line = format!(r#"{}, "outcome": {{"rejected": {rejected}}}}}"#, &line[..line.len() - 1]);
            parse(line.as_bytes(), 1).unwrap().unwrap().is_left_out()
        };
        for (rejected, expected) in [
            (r#"{"code": "policy_retrieval_failed", "by": "host"}"#, true),
            (r#"{"code": "policy_retrieval_failed", "by": "plugin"}"#, false),
            (r#"{"code": "policy_retrieval_failed"}"#, true),
            (r#"{"code": "policy_judge_failed"}"#, true),
            (r#"{"code": "deadline"}"#, true),
            (r#"{"code": "plugin_limit"}"#, false),
            (r#"{"code": "too_long"}"#, false),
        ] {
            assert_eq!(left_out(rejected), expected, "{rejected}");
        }
    }

    #[test]
    fn invalid_lines_name_the_expected_value() {
        let replaced = |from: &str, to: &str| one_line(BY_HAND).replacen(from, to, 1);
        for (line, expected) in [
            (replaced("\"format\": 2, ", ""), "`format` is missing; expected \"format\": 3"),
            (
                replaced("\"format\": 2", "\"format\": 1"),
                "`format` is 1; this querl reads 2 and 3: run the stage `rl` again",
            ),
            (
                replaced("\"format\": 2", "\"format\": 4"),
                "`format` is 4; this querl reads 2 and 3: run the querl that wrote it, or run the stage `rl` again",
            ),
            (replaced("0.8", "1.8"), "`reranker_score` of policy hit 1 is 1.8; expected 0 to 1"),
            (replaced("\"query\"", "\"qurey\""), "unknown field `qurey`"),
            (
                "{".into(),
                "not an episode: the line ends too early; a record is one line; correct or remove the line, or ",
            ),
            ("3".into(), "not an episode: invalid type: integer `3`, expected an object at byte 1; correct or remove "),
        ] {
            let error = parse(line.as_bytes(), 1).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn repeated_id_is_reported_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("episodes.jsonl");
        let line = one_line(BY_HAND);
        std::fs::write(&path, format!("{line}\n\n{line}\n")).unwrap();
        let error = read(&path).unwrap_err().to_string();
        let expected = "episodes.jsonl:3: the id `a` is that of an earlier line; expected unique ids";
        assert!(error.ends_with(expected), "{error}");
    }

    /// True if `value` has all values of `part`; it may have more keys.
    fn includes(value: &serde_json::Value, part: &serde_json::Value) -> bool {
        use serde_json::Value::{Array, Object};
        match (value, part) {
            (Object(value), Object(part)) => {
                part.iter().all(|(key, part)| value.get(key).is_some_and(|value| includes(value, part)))
            }
            (Array(value), Array(part)) => {
                value.len() == part.len() && value.iter().zip(part).all(|(value, part)| includes(value, part))
            }
            _ => value == part,
        }
    }

    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(crate::properties(64))]

        #[test]
        fn written_episodes_are_read_back_and_a_cut_file_loses_none_silently(
            texts in vec(("\\PC{0,12}", ".{0,12}", 0.0..=1.0_f64, any::<bool>()), 1..5),
            cut in any::<prop::sample::Index>(),
        ) {
            let record = |(index, (query, rewrite, score, is_scored)): (usize, &(String, String, f64, bool))| {
                let mut episode = parse(one_line(BY_HAND).as_bytes(), 1).unwrap().unwrap().episode;
                episode.id = format!("{index}");
                episode.query.clone_from(query);
                episode.policy.rewrite.clone_from(rewrite);
                episode.policy.retrieval.as_mut().unwrap().as_mut().unwrap()[0].reranker_score = *score;
                let outcome = match is_scored {
                    true => Ok(Reward { total: *score, components: Vec::new() }),
                    false => Err(Rejection::new(rewrite.clone(), query.clone())),
                };
                EpisodeRecord { format: EpisodeRecord::FORMAT, step: index as u64, episode, calls: Vec::new(), outcome }
            };
            let records: Vec<EpisodeRecord> = texts.iter().enumerate().map(record).collect();
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("episodes.jsonl");
            crate::fsx::write_jsonl(&path, &records).unwrap();
            let read_back = || -> Result<Vec<EpisodeRecord>, EpisodesError> {
                let written = |RecordedEpisode { step, episode, calls, outcome, .. }| EpisodeRecord {
                    format: EpisodeRecord::FORMAT,
                    step,
                    episode,
                    calls,
                    outcome: outcome.unwrap(),
                };
                Ok(read(&path)?.into_iter().map(written).collect())
            };
            prop_assert_eq!(&read_back().unwrap(), &records);
            let bytes = std::fs::read(&path).unwrap();
            let kept = &bytes[..cut.index(bytes.len())];
            std::fs::write(&path, kept).unwrap();
            let n_whole = kept.iter().filter(|byte| **byte == b'\n').count();
            match read_back() {
                Ok(found) => {
                    // Truncated before a line break, which is not part of a record.
                    let n_found = n_whole + usize::from(kept.last().is_some_and(|byte| *byte != b'\n'));
                    prop_assert_eq!(&found[..], &records[..n_found]);
                }
                Err(error) => {
                    let expected = format!("episodes.jsonl:{}: ", n_whole + 1);
                    prop_assert!(error.to_string().contains(&expected), "{error}");
                }
            }
        }

        #[test]
        fn any_bytes_are_episodes_or_an_error_in_one_sentence(
            bytes in vec(any::<u8>(), 0..200), at in any::<prop::sample::Index>(), byte in any::<u8>(),
        ) {
            let mut damaged = one_line(BY_HAND).into_bytes();
            let at = at.index(damaged.len());
            damaged[at] = byte;
            for line in [bytes, damaged] {
                match parse(&line, 1) {
                    Ok(Some(read)) => {
                        let sent: serde_json::Value = serde_json::from_slice(&line).unwrap();
                        let written = serde_json::to_value(&read.episode).unwrap();
                        prop_assert!(includes(&written, &sent["episode"]), "{written}");
                    }
                    Ok(None) => prop_assert!(line.iter().all(u8::is_ascii_whitespace)),
                    Err(error) => prop_assert!(!error.contains('\n'), "{error}"),
                }
            }
        }
    }
}
