//! Teachers, which write rewrites: a file of recorded rewrites, or a model behind an OpenAI-compatible endpoint.

use crate::client::ServiceContext;
use crate::client::chat::ChatClient;
use crate::client::response_cache::{CacheTable, ServiceCache};
use crate::dataset::records::{IndexedLines, Rows};
use crate::error::DataError;
use crate::first_row::FirstRow;
use crate::table::{Table, find_column, open_table, query_id, value_text};
use crate::text::{hash_of, with_width};
use async_trait::async_trait;
use querl_core::config::{Config, DataConfig, EndpointConfig, TeacherConfig, TeacherKind, TextWidth};
use querl_core::fsx::{NumberedLine, open_rows};
use querl_core::ports::Teacher;
use querl_core::records::{CallFailure, Completion, FailureKind, Message, QueryRow};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Opens the configured teacher, with its fallback if configured; `data` has the column names that recorded rewrites are read with. For a
/// local model see [`LocalRewriteStage`](crate::LocalRewriteStage).
///
/// # Errors
/// A setting of this kind of teacher is missing, or the recorded rewrites cannot be read.
pub fn open_teacher(
    config: &TeacherConfig,
    fallback: &EndpointConfig,
    data: &DataConfig,
    services: &ServiceContext,
) -> Result<Arc<dyn Teacher>, DataError> {
    let open_fallback = || open_fallback(fallback, services);
    match config.kind {
        TeacherKind::Recorded => {
            let problem = "is not set; a teacher of kind `recorded` needs a file of rewrites";
            let path = config.path.as_deref().ok_or_else(|| DataError::setting("teacher.path", problem))?;
            let teacher = RecordedTeacher::read(path, data)?;
            Ok(Arc::new(RecordedTeacher { fallback: open_fallback()?, ..teacher }))
        }
        TeacherKind::Openai => {
            let teacher = OpenAiTeacher::open("teacher", config.endpoint(), services)?;
            Ok(Arc::new(OpenAiTeacher { fallback: open_fallback()?, ..teacher }))
        }
        TeacherKind::Local => {
            let problem = "is `local`: a model in this process, which has no address to call";
            Err(DataError::setting("teacher.kind", problem))
        }
    }
}

/// Checks the file of a recorded teacher before the stage runs. Returns the message of [`not_recorded`] for `queries`.
///
/// # Errors
/// The file or the queries cannot be read, or the file does not contain recorded rewrites.
pub fn check_recording(config: &Config, queries: &dyn Rows<QueryRow>) -> Result<Option<String>, DataError> {
    let (Some(TeacherKind::Recorded), Some(path)) = (config.called_teacher(), &config.teacher.path) else {
        return Ok(None);
    };
    let teacher = RecordedTeacher::read(path, &config.data)?;
    if config.fallback_teacher.base_url.is_some() {
        return Ok(None);
    }
    let (mut n_missing, mut n_queries) = (0, 0);
    for query in queries.read()? {
        n_queries += 1;
        n_missing += u64::from(!teacher.has(&query?.id));
    }
    Ok(not_recorded(path, n_missing, n_queries, teacher.keys.hint().as_deref()))
}

/// A message if a recorded teacher lacks more than 5 % of the queries, otherwise `None`. `hint` is that of [`Teacher::hint`].
pub fn not_recorded(path: &Path, n_missing: u64, n_queries: u64, hint: Option<&str>) -> Option<String> {
    const MANY: f64 = 0.05;
    let hint = hint.map(|hint| format!("; {hint}")).unwrap_or_default();
    (n_missing as f64 > MANY * n_queries as f64).then(|| {
        format!(
            "the recorded teacher ({}) has no rewrite of {n_missing} of {n_queries} queries{hint}; add them there, or set \
             fallback_teacher.base_url",
            path.display()
        )
    })
}

/// Opens the fallback teacher; `None` if none is configured.
///
/// # Errors
/// The endpoint lacks a model or its API key.
pub fn open_fallback(
    fallback: &EndpointConfig,
    services: &ServiceContext,
) -> Result<Option<Arc<dyn Teacher>>, DataError> {
    if fallback.base_url.is_none() {
        return Ok(None);
    }
    Ok(Some(Arc::new(OpenAiTeacher::open("fallback_teacher", fallback.endpoint(), services)?)))
}

/// Recorded rewrites, looked up by query, profile and history.
struct RecordedTeacher {
    path: String,
    keys: Keys,
    rewrites: RecordedRewrites,
    fallback: Option<Arc<dyn Teacher>>,
}

enum RecordedRewrites {
    /// Recorded rewrites in a JSON lines file: byte offset by hash of the query id.
    Lines { offsets: HashMap<u64, u64>, lines: Mutex<IndexedLines> },
    /// Recorded rewrites in a table: rewrite by query id.
    Table(HashMap<String, String>),
}

#[derive(Deserialize)]
struct Recording {
    rewritten_query: String,
    cost: Option<f64>,
    latency_ms: Option<f64>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Key or column of the rewrites.
const REWRITE: &str = "rewritten_query";
/// Maximum number of keys in a message.
const MAX_UNREAD: usize = 16;

/// Names of the keys of a recording, and which of them its lines have.
struct Keys {
    /// For query, profile and history the column configured in `[data]`, then the field of querl's records.
    names: [[String; 2]; 3],
    seen: [bool; 3],
    /// Character width setting of the query table, from whose rows the ids are computed.
    width: TextWidth,
    /// Columns of the query table that a recording does not need.
    unneeded: Vec<String>,
    unread: BTreeSet<String>,
}

impl Keys {
    fn of(data: &DataConfig) -> Self {
        let names = [
            [data.query_column.as_str(), "original_query"],
            [data.profile_column.as_str(), "user_profile"],
            [data.history_column.as_str(), "history_summary"],
        ];
        let names = names.map(|pair| pair.map(str::to_owned));
        let unneeded =
            [data.gold_column.clone(), "gold_ids".into()].into_iter().chain(data.group_column.clone()).collect();
        Self { names, seen: [false; 3], width: data.width, unneeded, unread: BTreeSet::new() }
    }

    /// The columns of a table that have query, profile and history.
    fn columns(&mut self, table: &Table) -> Result<[Option<usize>; 3], DataError> {
        let find = |names: &[String; 2]| names.iter().find_map(|name| find_column(table, name).transpose()).transpose();
        let [query, profile, history] = self.names.each_ref().map(find);
        let found = [query?, profile?, history?];
        self.seen = found.map(|column| column.is_some());
        let is_unread = |(index, name): &(usize, &String)| {
            !name.is_empty()
                && name.trim() != REWRITE
                && !found.contains(&Some(*index))
                && !self.names.as_flattened().contains(name)
                && !self.unneeded.contains(name)
        };
        let unread = table.header.iter().enumerate().filter(is_unread).take(MAX_UNREAD);
        self.unread = unread.map(|(_, name)| name.clone()).collect();
        Ok(found)
    }

    /// The id of the query, profile and history of a line, normalised as in the query table, and the query.
    fn id(&self, recording: &Recording) -> Result<(String, String), String> {
        let value = |name: &String| recording.others.get(name).filter(|value| !value.is_null());
        let [query, profile, history] = [0, 1, 2].map(|index| {
            let value = self.names[index].iter().find_map(value);
            value.map(|value| with_width(value_text(value).trim(), self.width))
        });
        let query = query.ok_or_else(|| format!("has no key {}", either(&self.names[0])))?;
        let id = query_id(&query, &profile.unwrap_or_default(), &history.unwrap_or_default());
        Ok((id, query))
    }

    fn note(&mut self, recording: &Recording) {
        for key in recording.others.keys() {
            if let Some(index) = self.names.iter().position(|names| names.contains(key)) {
                self.seen[index] = true;
            } else if self.unread.len() < MAX_UNREAD && !self.unneeded.contains(key) {
                self.unread.insert(key.clone());
            }
        }
    }

    fn expected(&self) -> String {
        let [query, profile, history] = self.names.each_ref().map(either);
        format!("{query} and `{REWRITE}`, and with {profile} and {history} where the query table has them")
    }

    /// The unread keys, as a clause, if one of them may contain the profile or history.
    fn hint(&self) -> Option<String> {
        let lacking: Vec<String> =
            self.names.iter().zip(self.seen).filter(|(_, seen)| !seen).map(|(names, _)| either(names)).collect();
        if lacking.is_empty() || self.unread.is_empty() {
            return None;
        }
        let unread: Vec<String> = self.unread.iter().map(|key| format!("`{key}`")).collect();
        Some(format!("its rows have no {}, and their {} is not read", lacking.join(" and no "), unread.join(", ")))
    }
}

/// Both names of a key; one if they are equal.
fn either([configured, name]: &[String; 2]) -> String {
    if configured == name { format!("`{name}`") } else { format!("`{configured}` or `{name}`") }
}

/// Checks that the first row has the columns of a recording.
fn check_columns(path: &Path, keys: &Keys) -> Result<(), DataError> {
    let Some(first) = FirstRow::read(path)? else { return Ok(()) };
    if keys.names[0].iter().any(|name| first.has(name)) && first.has(REWRITE) {
        return Ok(());
    }
    Err(DataError::line(path, first.line, format!("{first}; expected JSON lines with {}", keys.expected())))
}

impl RecordedTeacher {
    fn read(path: &Path, data: &DataConfig) -> Result<Self, DataError> {
        let mut keys = Keys::of(data);
        let ending = path.extension().unwrap_or_default();
        if ["xlsx", "csv", "tsv", "parquet"].iter().any(|known| ending.eq_ignore_ascii_case(known)) {
            let rewrites = RecordedRewrites::Table(table_rewrites(path, &mut keys)?);
            return Ok(Self { path: path.display().to_string(), keys, rewrites, fallback: None });
        }
        check_columns(path, &keys)?;
        let mut offsets = HashMap::new();
        // Line and hash of the rewrite.
        let mut rewrites: HashMap<u64, (usize, u64)> = HashMap::new();
        for line in open_rows::<Recording>(path)? {
            let NumberedLine { line, offset, value } = line?;
            keys.note(&value);
            let (id, query) = keys.id(&value).map_err(|problem| DataError::line(path, line, problem))?;
            let id = hash_of(&id);
            let rewrite = hash_of(value.rewritten_query.trim());
            match rewrites.insert(id, (line, rewrite)) {
                Some((first, other)) if other != rewrite => {
                    let rename = keys.hint().map(|hint| format!("{hint}: rename it, or ")).unwrap_or_default();
                    let problem =
                        format!("`{query}` has another rewrite in line {first}; {rename}remove one of the two lines");
                    return Err(DataError::line(path, line, problem));
                }
                _ => offsets.insert(id, offset),
            };
        }
        let lines = Mutex::new(IndexedLines::open(path)?);
        let rewrites = RecordedRewrites::Lines { offsets, lines };
        Ok(Self { path: path.display().to_string(), keys, rewrites, fallback: None })
    }

    fn has(&self, id: &str) -> bool {
        match &self.rewrites {
            RecordedRewrites::Lines { offsets, .. } => offsets.contains_key(&hash_of(id)),
            RecordedRewrites::Table(rewrites) => rewrites.contains_key(id),
        }
    }

    fn recording(&self, id: &str) -> Result<Option<Recording>, DataError> {
        let (offsets, lines) = match &self.rewrites {
            RecordedRewrites::Lines { offsets, lines } => (offsets, lines),
            RecordedRewrites::Table(rewrites) => {
                let of_row = |rewrite: &String| Recording {
                    rewritten_query: rewrite.clone(),
                    cost: None,
                    latency_ms: None,
                    others: Map::new(),
                };
                return Ok(rewrites.get(id).map(of_row));
            }
        };
        let Some(offset) = offsets.get(&hash_of(id)) else { return Ok(None) };
        let recording: Recording = lines.lock().unwrap_or_else(PoisonError::into_inner).read(*offset)?;
        // Two ids may have the same hash.
        let is_same = self.keys.id(&recording).is_ok_and(|(own, _)| own == id);
        Ok(is_same.then_some(recording))
    }
}

/// The rewrites of a table, whose cells are normalised as in the query table. Rows without a rewrite are skipped.
fn table_rewrites(path: &Path, keys: &mut Keys) -> Result<HashMap<String, String>, DataError> {
    let table = open_table(path)?;
    let [query, profile, history] = keys.columns(&table)?;
    let rewrite = find_column(&table, REWRITE)?;
    let (Some(query), Some(rewrite)) = (query, rewrite) else {
        let found: Vec<&str> =
            table.header.iter().map(String::as_str).filter(|name| !name.is_empty()).take(MAX_UNREAD).collect();
        let problem = format!("has the columns {}; expected a table with {}", found.join(", "), keys.expected());
        return Err(DataError::file(path, problem));
    };
    let used: Vec<usize> = [Some(query), Some(rewrite), profile, history].into_iter().flatten().collect();
    // With the first row of each.
    let mut rewrites: HashMap<String, (String, usize)> = HashMap::new();
    for row in table.rows(&used)? {
        let (row, cells) = row?;
        let cell = |column: Option<usize>| column.and_then(|column| cells.get(column)).map_or("", |cell| cell.trim());
        let [query, profile, history] =
            [Some(query), profile, history].map(|column| with_width(cell(column), keys.width));
        let rewrite = cell(Some(rewrite));
        if query.is_empty() || rewrite.is_empty() {
            continue;
        }
        let id = query_id(&query, &profile, &history);
        let (recorded, first) = rewrites.entry(id).or_insert_with(|| (rewrite.to_owned(), row));
        if recorded.as_str() != rewrite {
            let problem = format!("`{query}` has another rewrite in row {first}; remove one of the two rows");
            return Err(DataError::line(path, row, problem));
        }
    }
    Ok(rewrites.into_iter().map(|(id, (rewrite, _))| (id, rewrite)).collect())
}

#[async_trait]
impl Teacher for RecordedTeacher {
    async fn rewrite(&self, query: &QueryRow, _messages: &[Message]) -> Result<Completion, CallFailure> {
        match self.recording(&query.id) {
            Ok(Some(Recording { rewritten_query, cost, latency_ms, .. })) => {
                Ok(Completion { cost, latency_ms, ..Completion::of(rewritten_query) })
            }
            Err(error) => Err(CallFailure { kind: FailureKind::InvalidResponse, message: error.to_string() }),
            Ok(None) => Err(CallFailure {
                kind: FailureKind::NotRecorded,
                message: format!(
                    "{} has no rewrite of `{}` in this context{}",
                    self.path,
                    query.original_query,
                    self.keys.hint().map(|hint| format!("; {hint}")).unwrap_or_default()
                ),
            }),
        }
    }

    fn hint(&self) -> Option<String> {
        self.keys.hint()
    }

    fn fallback(&self) -> Option<&dyn Teacher> {
        self.fallback.as_deref()
    }

    fn name(&self) -> &str {
        "recorded (stand-in)"
    }
}

/// A model behind an OpenAI-compatible endpoint, with the response cache.
struct OpenAiTeacher {
    client: ChatClient,
    cache: ServiceCache,
    fallback: Option<Arc<dyn Teacher>>,
}

impl OpenAiTeacher {
    fn open(section: &str, endpoint: EndpointConfig, services: &ServiceContext) -> Result<Self, DataError> {
        let client = ChatClient::open(section, endpoint, services)?;
        let cache = ServiceCache::open(services, CacheTable::Rewrites, client.provider(), &client.identity());
        Ok(Self { client, cache, fallback: None })
    }
}

#[async_trait]
impl Teacher for OpenAiTeacher {
    async fn rewrite(&self, _query: &QueryRow, messages: &[Message]) -> Result<Completion, CallFailure> {
        self.cache.get_or_call(&messages, self.client.complete(messages)).await
    }

    fn knows(&self, messages: &[Message]) -> bool {
        self.cache.contains(&messages)
    }

    fn forget(&self, messages: &[Message]) {
        self.cache.forget(&messages);
    }

    fn keep(&self, messages: &[Message], completion: &Completion) {
        self.cache.put(&messages, completion);
    }

    fn fallback(&self) -> Option<&dyn Teacher> {
        self.fallback.as_deref()
    }

    fn name(&self) -> &str {
        self.client.model()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use wiremock::matchers::{body_partial_json, path};
    use wiremock::{Mock, MockServer, ResponseTemplate};

    fn row(query: &str, history: &str) -> QueryRow {
        QueryRow {
            id: query_id(query, "", history),
            row: 2,
            original_query: query.into(),
            history_summary: history.into(),
            group: query.into(),
            ..QueryRow::default()
        }
    }

    fn openai(settings: Value) -> TeacherConfig {
        let mut config =
            json!({"kind": "openai", "model": "gpt-5", "api_key_env": "", "max_retries": 0, "timeout_s": 2.0});
        config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        serde_json::from_value(config).unwrap()
    }

    async fn ask(settings: Value, expected: Value, answer: Value) -> Result<Completion, CallFailure> {
        let server = MockServer::start().await;
        let template = ResponseTemplate::new(200).set_body_json(answer);
        let mock = Mock::given(path("/v1/chat/completions")).and(body_partial_json(expected)).respond_with(template);
        mock.mount(&server).await;
        let mut config = openai(settings);
        config.base_url = Some(format!("{}/v1/", server.uri()));
        let messages = [Message { role: "user".into(), content: "改写".into() }];
        let answer =
            open_teacher(&config, &EndpointConfig::default(), &DataConfig::default(), &ServiceContext::default())
                .unwrap()
                .rewrite(&row("怎么吃", ""), &messages)
                .await;
        let sent: Value = server.received_requests().await.unwrap()[0].body_json().unwrap();
        assert_eq!(sent.get("temperature").is_some(), config.temperature.is_some());
        answer
    }

    #[tokio::test]
    async fn a_recording_is_found_by_query_and_context() {
        let (_folder, path) = crate::scratch_file("rewrites.jsonl");
        std::fs::write(
            &path,
            "{\"original_query\": \"怎么吃\", \"history_summary\": \"问过鱼油\", \"rewritten_query\": \"鱼油 食用方法\"}\n",
        )
        .unwrap();
        let config = TeacherConfig { kind: TeacherKind::Recorded, path: Some(path), ..TeacherConfig::default() };
        let teacher =
            open_teacher(&config, &EndpointConfig::default(), &DataConfig::default(), &ServiceContext::default())
                .unwrap();
        assert_eq!(teacher.name(), "recorded (stand-in)");
        assert_eq!(teacher.rewrite(&row("怎么吃", "问过鱼油"), &[]).await.unwrap().text, "鱼油 食用方法");
        let failure = teacher.rewrite(&row("怎么吃", ""), &[]).await.unwrap_err();
        assert_eq!(failure.kind, FailureKind::NotRecorded);
    }

    #[test]
    fn two_rewrites_of_one_query_are_rejected_and_equal_rows_are_not() {
        let (_folder, path) = crate::scratch_file("rewrites.jsonl");
        let line =
            |query: &str, rewrite: &str| json!({"original_query": query, "rewritten_query": rewrite}).to_string();
        let read = |lines: &[String]| {
            std::fs::write(&path, lines.join("\n\n")).unwrap();
            RecordedTeacher::read(&path, &DataConfig::default())
                .map(|teacher| ["怎么吃", "贵吗"].map(|query| teacher.has(&row(query, "").id)))
                .map_err(|error| error.to_string())
        };
        let lines = [line("怎么吃", "鱼油 用法"), line("贵吗", "价格"), line(" 怎么吃", "鱼油 用法 ")];
        assert_eq!(read(&lines), Ok([true; 2]));
        let error = read(&[&lines[..], &[line("怎么吃", "钙片 用法")]].concat()).unwrap_err();
        let expected = "rewrites.jsonl:7: `怎么吃` has another rewrite in line 5; remove one of the two lines";
        assert!(error.ends_with(expected), "{error}");
    }

    /// The same file may be query table and recording: cells of both are normalised in the same way.
    #[test]
    fn cells_of_a_recording_are_read_as_those_of_the_query_table() {
        let (_folder, path) = crate::scratch_file("teacher.jsonl");
        let lines = [
            json!({"q": "Ａ", "h": null, "history_summary": "a,b", "rewritten_query": "x"}),
            json!({"q": "b", "h": ["a", "b"], "rewritten_query": "y"}),
            json!({"q": 3, "rewritten_query": "z"}),
        ];
        std::fs::write(&path, lines.map(|line| line.to_string()).join("\n")).unwrap();
        let data = DataConfig {
            query_column: "q".into(),
            history_column: "h".into(),
            width: TextWidth::All,
            ..DataConfig::default()
        };
        let teacher = RecordedTeacher::read(&path, &data).unwrap();
        for (query, history, rewrite) in [("A", "a,b", "x"), ("b", "a,b", "y"), ("3", "", "z")] {
            let found = teacher.recording(&row(query, history).id).unwrap().unwrap();
            assert_eq!(found.rewritten_query, rewrite);
        }
    }

    #[tokio::test]
    async fn a_table_with_a_column_of_rewrites_is_a_recording() {
        let (_folder, path) = crate::scratch_file("queries.csv");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            RecordedTeacher::read(&path, &DataConfig::default())
        };
        let header = "问题,历史摘要,rewritten_query,备注\n";
        let teacher = read(&format!("{header}怎么吃,问过鱼油,鱼油 食用方法,x\n怎么吃,,,\n贵吗,,价格,\n")).unwrap();
        let recorded = teacher.rewrite(&row("怎么吃", "问过鱼油"), &[]).await.unwrap();
        assert_eq!((recorded.text.as_str(), teacher.has(&row("贵吗", "").id)), ("鱼油 食用方法", true));
        let missing = teacher.rewrite(&row("怎么吃", ""), &[]).await.unwrap_err();
        assert_eq!(missing.kind, FailureKind::NotRecorded);
        let hint = "its rows have no `用户画像` or `user_profile`, and their `备注` is not read";
        assert!(missing.message.ends_with(hint), "{}", missing.message);
        let error = |text: &str| read(text).err().unwrap().to_string();
        let twice = error(&format!("{header}贵吗,,价格,\n贵吗,,多少钱,\n"));
        let expected = "queries.csv:3: `贵吗` has another rewrite in row 2; remove one of the two rows";
        assert!(twice.ends_with(expected), "{twice}");
        let other = error("问题,改写\n贵吗,价格\n");
        let expected = "queries.csv: has the columns 问题, 改写; expected a table with `问题` or `original_query` and `rewritten_query`";
        assert!(other.contains(expected), "{other}");
        // Symptom: the first of two columns of one name was read.
        for (header, name) in [("问题,rewritten_query,rewritten_query", REWRITE), ("rewritten_query,问题,问题", "问题")]
        {
            let repeated = error(&format!("{header}\n甲,乙,丙\n"));
            let expected = format!("columns 2 and 3 are both called `{name}`; rename one of them");
            assert!(repeated.ends_with(&expected), "{repeated}");
        }
    }

    /// Regression: the key `history` was ignored, so that rows of one query conflicted or were missing.
    #[tokio::test]
    async fn keys_have_the_names_of_the_columns_and_unread_ones_are_named() {
        let (_folder, path) = crate::scratch_file("rewrites.jsonl");
        let line = |history: &str, rewrite: &str| {
            json!({"q": "怎么吃", "history": history, "gold_ids": "a", "rewritten_query": rewrite}).to_string()
        };
        std::fs::write(&path, [line("问过鱼油", "鱼油 用法"), line("问过钙片", "钙片 用法")].join("\n")).unwrap();
        let data = |history: &str| DataConfig {
            query_column: "q".into(),
            history_column: history.into(),
            ..DataConfig::default()
        };
        let teacher = RecordedTeacher::read(&path, &data("history")).unwrap();
        assert_eq!(teacher.rewrite(&row("怎么吃", "问过钙片"), &[]).await.unwrap().text, "钙片 用法");
        let error = RecordedTeacher::read(&path, &data("summary")).err().unwrap().to_string();
        let expected = "rewrites.jsonl:2: `怎么吃` has another rewrite in line 1; its rows have no `用户画像` or `user_profile` and no \
                        `summary` or `history_summary`, and their `history` is not read: rename it, or remove one of the two lines";
        assert!(error.ends_with(expected), "{error}");
        std::fs::write(&path, line("问过鱼油", "鱼油 用法")).unwrap();
        let teacher = RecordedTeacher::read(&path, &data("summary")).unwrap();
        let failure = teacher.rewrite(&row("怎么吃", "问过鱼油"), &[]).await.unwrap_err();
        assert!(failure.message.ends_with("and their `history` is not read"), "{failure}");
    }

    #[tokio::test]
    async fn completion_carries_text_tokens_and_cost() {
        let prices = json!({"price_prompt_per_million": 2.0, "price_completion_per_million": 10.0});
        let expected =
            json!({"model": "gpt-5", "max_completion_tokens": 200, "messages": [{"role": "user", "content": "改写"}]});
        let usage = json!({"prompt_tokens": 1000, "completion_tokens": 100});
        let answer = json!({"choices": [{"message": {"content": "鱼油 食用方法"}}], "usage": usage});
        let completion = ask(prices, expected, answer).await.unwrap();
        assert_eq!(completion.text, "鱼油 食用方法");
        assert_eq!((completion.prompt_tokens, completion.completion_tokens), (Some(1000), Some(100)));
        assert!((completion.cost.unwrap() - 0.003).abs() < 1e-12);
        assert!(completion.latency_ms.is_some());
    }

    #[tokio::test]
    async fn older_endpoints_get_max_tokens() {
        let settings = json!({"legacy_max_tokens": true, "max_tokens": 64, "temperature": 0.3});
        let expected = json!({"max_tokens": 64, "temperature": 0.3});
        let answer = json!({"choices": [{"message": {"content": [{"type": "text", "text": "鱼油"}]}}]});
        let completion = ask(settings, expected, answer).await.unwrap();
        assert_eq!((completion.text.as_str(), completion.cost), ("鱼油", None));
    }

    #[tokio::test]
    async fn truncated_and_empty_responses_are_invalid() {
        let cases = [
            (json!(null), "length", "the answer was cut off (finish_reason `length`); raise max_tokens"),
            (json!("鱼油 食用"), "length", "the answer was cut off (finish_reason `length`); raise max_tokens"),
            (
                json!("鱼油"),
                "content_filter",
                "(finish_reason `content_filter`); the endpoint's filter blocked this text",
            ),
            (json!(" "), "stop", "the answer holds no text (finish_reason `stop`)"),
            (
                json!("鱼油 食"),
                "weariness",
                "ended with finish_reason `weariness`, which does not say that it is whole",
            ),
        ];
        for (content, finish_reason, message) in cases {
            let answer = json!({"choices": [{"message": {"content": content}, "finish_reason": finish_reason}]});
            let failure = ask(json!({}), json!({}), answer).await.unwrap_err();
            assert_eq!(failure.kind, FailureKind::InvalidResponse);
            assert!(failure.message.ends_with(message), "{failure}");
        }
    }

    #[tokio::test]
    async fn finish_reasons_of_complete_responses_are_accepted() {
        for finish_reason in [json!(null), json!("stop"), json!("STOP"), json!("eos_token"), json!("end_turn")] {
            let answer = json!({"choices": [{"message": {"content": "鱼油"}, "finish_reason": finish_reason}]});
            assert_eq!(ask(json!({}), json!({}), answer).await.unwrap().text, "鱼油", "{finish_reason}");
        }
    }

    /// The failure of a teacher whose service always gives `answer` with status 200, with at most one retry; the number of requests.
    async fn failure_of(answer: Value) -> (CallFailure, usize, ServiceContext) {
        let server = MockServer::start().await;
        let template = ResponseTemplate::new(200).set_body_json(answer);
        Mock::given(path("/v1/chat/completions")).respond_with(template).mount(&server).await;
        let config = openai(json!({"base_url": format!("{}/v1", server.uri()), "max_retries": 1}));
        let services = ServiceContext::default();
        let teacher = open_teacher(&config, &EndpointConfig::default(), &DataConfig::default(), &services).unwrap();
        let messages = [Message { role: "user".into(), content: "改写".into() }];
        let failure = teacher.rewrite(&row("怎么吃", ""), &messages).await.unwrap_err();
        (failure, server.received_requests().await.unwrap().len(), services)
    }

    /// Regression: an aborted response was used as a rewrite, and a gateway's error was taken for an empty response.
    #[tokio::test]
    async fn errors_under_status_200_are_retried_and_quoted() {
        let half =
            json!({"choices": [{"message": {"content": "鱼油 食"}, "finish_reason": "insufficient_system_resource"}]});
        let limited = json!({"error": {"message": "upstream rate limited", "code": 429}});
        let empty = json!({"error": {"message": "Insufficient credits", "code": "402"}});
        for (answer, kind, n_asked, message) in [
            (
                half,
                FailureKind::ServerError,
                2,
                "the answer was broken off (finish_reason `insufficient_system_resource`)",
            ),
            (limited, FailureKind::RateLimited, 2, "answered with an error: upstream rate limited"),
            (empty, FailureKind::Unauthorized, 1, "answered with an error: Insufficient credits"),
        ] {
            let (failure, n_requests, services) = failure_of(answer).await;
            assert!(failure.kind == kind && failure.message.ends_with(message), "{failure}");
            assert_eq!(n_requests, n_asked);
            let spent = services.spend_tracker().of_stage("");
            assert_eq!((spent.prompt_tokens, spent.lost > 0), (0, message.contains("broken off")), "{spent:?}");
        }
    }

    /// Regression: a row failed after one response of status 200 without a text.
    #[tokio::test]
    async fn responses_without_a_text_are_requested_again_and_charged() {
        let usage = json!({"prompt_tokens": 1000, "completion_tokens": 100});
        let good = json!({"choices": [{"message": {"content": "鱼油"}}], "usage": usage});
        let empty = |content: Value| json!({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]});
        let mut counted = empty(json!(null));
        counted["usage"] = usage;
        let cases = [
            (json!({}), 1, 1000),
            (json!({"choices": []}), 1, 1000),
            (json!({"choices": [{}]}), 1, 1000),
            (empty(json!(" ")), 1, 1000),
            (counted, 0, 2000),
        ];
        let checked = cases.map(|(answer, n_lost, prompt_tokens)| {
            let good = good.clone();
            async move {
                let server = MockServer::start().await;
                let reply = |answer: &Value| ResponseTemplate::new(200).set_body_json(answer);
                let first = Mock::given(path("/v1/chat/completions")).respond_with(reply(&answer));
                first.up_to_n_times(1).mount(&server).await;
                Mock::given(path("/v1/chat/completions")).respond_with(reply(&good)).mount(&server).await;
                let config = openai(json!({"base_url": format!("{}/v1", server.uri()), "max_retries": 1}));
                let services = ServiceContext::default();
                let teacher =
                    open_teacher(&config, &EndpointConfig::default(), &DataConfig::default(), &services).unwrap();
                let messages = [Message { role: "user".into(), content: "改写".into() }];
                let completion = teacher.rewrite(&row("怎么吃", ""), &messages).await;
                assert_eq!(completion.unwrap().text, "鱼油", "{answer}");
                let spent = services.spend_tracker().of_stage("");
                assert_eq!((spent.calls, spent.tries), (1, 2), "{answer}");
                assert_eq!((spent.lost, spent.prompt_tokens), (n_lost, prompt_tokens), "{answer}");
            }
        });
        futures::future::join_all(checked).await;
    }

    /// Regression: an empty response that was cut off was requested, and paid, again.
    #[tokio::test]
    async fn an_empty_response_with_another_finish_reason_is_final() {
        for (reason, n_requests) in [("max_tokens", 1), ("tool_calls", 1), ("LENGTH", 1), ("STOP", 2), ("ERROR", 2)] {
            let server = MockServer::start().await;
            let answer = json!({"choices": [{"message": {"content": ""}, "finish_reason": reason}]});
            let template = ResponseTemplate::new(200).set_body_json(answer);
            Mock::given(path("/v1/chat/completions")).respond_with(template).mount(&server).await;
            let config = openai(json!({"base_url": format!("{}/v1", server.uri()), "max_retries": 1}));
            let teacher =
                open_teacher(&config, &EndpointConfig::default(), &DataConfig::default(), &ServiceContext::default())
                    .unwrap();
            let messages = [Message { role: "user".into(), content: "改写".into() }];
            assert!(teacher.rewrite(&row("怎么吃", ""), &messages).await.is_err(), "{reason}");
            assert_eq!(server.received_requests().await.unwrap().len(), n_requests, "{reason}");
        }
    }

    /// Regression: the text of a refusal was not shown, and the request was paid again.
    #[tokio::test]
    async fn a_refusal_of_the_model_is_quoted_and_final() {
        let message = json!({"role": "assistant", "content": null, "refusal": "I cannot\n\u{1b}[31mhelp"});
        let answer = json!({"choices": [{"message": message, "finish_reason": "stop"}]});
        let (failure, n_requests, _) = failure_of(answer).await;
        assert_eq!(failure.kind, FailureKind::InvalidResponse);
        assert!(failure.message.ends_with(": the model refused to answer: I cannot [31mhelp"), "{failure}");
        assert_eq!(n_requests, 1);
    }

    /// Regression: an implausible token count was charged.
    #[tokio::test]
    async fn implausible_token_counts_are_ignored() {
        let usage = json!({"prompt_tokens": u64::MAX, "completion_tokens": 1});
        let answer = json!({"choices": [{"message": {"content": "鱼油"}}], "usage": usage});
        assert_eq!(ask(json!({}), json!({}), answer).await.unwrap().prompt_tokens, None);
    }

    #[test]
    fn missing_settings_are_named() {
        let message = |config: &TeacherConfig| {
            open_teacher(config, &EndpointConfig::default(), &DataConfig::default(), &ServiceContext::default())
                .err()
                .unwrap()
                .to_string()
        };
        assert_eq!(message(&openai(json!({}))), "teacher.base_url is not set; kind `openai` needs it");
        let keyed = openai(json!({"base_url": "http://127.0.0.1/v1", "api_key_env": "QUERL_NO_SUCH_KEY"}));
        assert!(
            message(&keyed).starts_with(
                "teacher.api_key_env names the environment variable `QUERL_NO_SUCH_KEY`, which is not set"
            )
        );
        let recorded = TeacherConfig { kind: TeacherKind::Recorded, ..TeacherConfig::default() };
        assert!(message(&recorded).starts_with("teacher.path is not set"));
    }
}
