//! Host functions of plugins: computed by the models and services of a run, which record each result with its item; or replayed from
//! recorded results.

use crate::environment::calls::{CallError, within};
use crate::retrieval::local_models;
use querl_core::config::{Config, RetrievalConfig};
use querl_core::fsx::digest_hex;
use querl_core::ports::{HostFunctions, Judge, JudgeRequest, StyleModel};
use querl_core::records::{
    CallFailure, Context, Episode, FailureKind, HostCall, HostCallError, HostRequest, HostResponse, Message,
};
use querl_data::{ServiceContext, TextEncoder, WordSegmenter, open_judge};
use querl_model::TextTokenizer;
use querl_style::SharedStyleModel;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

type CallResult = Result<HostResponse, HostCallError>;

/// Host functions of a run. Models are opened at the first call, since most plugins use none.
#[derive(Default)]
pub struct RunHostFunctions {
    config: Option<Box<Config>>,
    style: Option<Arc<SharedStyleModel>>,
    services: OnceLock<(ServiceContext, tokio::runtime::Handle)>,
    tokenizer: Opened<TextTokenizer>,
    segmenter: Opened<WordSegmenter>,
    judge: Opened<Option<Arc<dyn Judge>>>,
    encoder: Opened<Option<TextEncoder>>,
    /// Cached embeddings by the digest of the text.
    vectors: Mutex<HashMap<String, Vec<f32>>>,
    items: Mutex<HashMap<String, Item>>,
}

/// A model that is opened once, or the error that each call returns.
type Opened<T> = OnceLock<Result<T, CallFailure>>;

/// Maximum number of cached embeddings; further ones are computed again.
const MAX_VECTORS: usize = 100_000;

/// Maximum size of the texts of one call in bytes.
const MAX_REQUEST_BYTES: usize = 1 << 20;

/// Maximum size of the texts and results of all calls for one item in bytes: they are recorded with the episode.
const MAX_ITEM_BYTES: usize = 4 << 20;

/// An item that is being scored, with the data that the rubric judge reads.
#[derive(Default)]
struct Item {
    query: String,
    context: Context,
    rewrite: String,
    /// Time limit of each call to a service; `None`: no limit.
    deadline: Option<Duration>,
    calls: Vec<HostCall>,
    /// Size in bytes of the texts and results of all calls so far.
    n_bytes: usize,
}

impl RunHostFunctions {
    /// Host functions for a configuration. Judge and encoder cannot be called before [`connect`](Self::connect).
    pub(crate) fn new(config: &Config, style: Option<Arc<SharedStyleModel>>) -> Self {
        Self { style, ..Self::of_filters(Some(config.clone())) }
    }

    /// Host functions for filters, which only call word segmentation: with the dictionary of a configuration, or the default one.
    pub fn of_filters(config: Option<Config>) -> Self {
        Self { config: config.map(Box::new), ..Self::default() }
    }

    /// Connects judge and encoder with the service clients of a run. Calls block on `runtime`, so they must not come from its own tasks.
    pub(crate) fn connect(&self, outside: ServiceContext, runtime: tokio::runtime::Handle) {
        let _ = self.services.set((outside, runtime));
    }

    /// Starts recording the calls for `episodes` and their groups. A call to a service that exceeds `deadline` fails.
    pub(crate) fn begin(&self, episodes: &[Episode], deadline: Option<Duration>) {
        let item = |episode: &Episode| Item {
            query: episode.query.clone(),
            context: episode.context.clone(),
            rewrite: episode.policy.rewrite.clone(),
            deadline,
            ..Item::default()
        };
        let mut items = self.items();
        for episode in episodes {
            items.insert(episode.id.clone(), item(episode));
            items.entry(episode.group_id.clone()).or_insert_with(|| item(episode));
        }
    }

    /// The calls that were recorded for an episode and its group so far.
    pub(crate) fn recorded(&self, episode: &Episode) -> Vec<HostCall> {
        let items = self.items();
        let mut calls = items.get(&episode.id).map_or_else(Vec::new, |item| item.calls.clone());
        if let Some(group) = items.get(&episode.group_id).filter(|_| episode.group_id != episode.id) {
            calls.extend(group.calls.iter().cloned());
        }
        calls
    }

    /// Ends the recording of an episode. The first episode of a group has the calls of the group.
    pub(crate) fn take_episode(&self, episode: &Episode) -> Vec<HostCall> {
        let mut calls = self.take(&episode.id);
        calls.extend(self.take(&episode.group_id));
        calls
    }

    fn take(&self, item_id: &str) -> Vec<HostCall> {
        self.items().remove(item_id).map_or_else(Vec::new, |item| item.calls)
    }

    fn items(&self) -> MutexGuard<'_, HashMap<String, Item>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, item_id: &str, request: &HostRequest) -> CallResult {
        match request {
            HostRequest::CountTokens(text) => Ok(HostResponse::Count(self.token_ids(text)?.len() as u32)),
            HostRequest::SplitTokens(text) => {
                let (ids, tokenizer) = (self.token_ids(text)?, self.tokenizer()?);
                let tokens = ids.iter().map(|id| tokenizer.decode(&[*id]).map_err(|error| failed(&error)));
                Ok(HostResponse::Texts(tokens.collect::<Result<_, _>>()?))
            }
            HostRequest::SegmentWords(text) => Ok(HostResponse::Texts(self.segmenter()?.words(text))),
            HostRequest::Embed(texts) => self.embed(texts, self.deadline(item_id)),
            HostRequest::AskJudge(messages) => {
                let config = self.config()?;
                let (outside, runtime) = self.services.get().ok_or(HostCallError::NotConfigured)?;
                let open = || open_judge(&config.judge, &config.retrieval, outside);
                let judge = opened(&self.judge, open)?.as_deref().ok_or(HostCallError::NotConfigured)?;
                let item = self
                    .items()
                    .get(item_id)
                    .map(|item| (item.query.clone(), item.context.clone(), item.rewrite.clone()));
                let (query, context, rewrite) = item.unwrap_or_default();
                let request = JudgeRequest { query: &query, context: &context, rewrite: &rewrite, messages };
                let completion = runtime.block_on(within(self.deadline(item_id), judge.judge(request)));
                Ok(HostResponse::Text(completion.map_err(missed)?.text))
            }
            HostRequest::ClassifyStyle(turns) => {
                let model = self.style.as_ref().ok_or(HostCallError::NotConfigured)?;
                model.classify(turns).map(HostResponse::Style).map_err(HostCallError::Failed)
            }
        }
    }

    fn deadline(&self, item_id: &str) -> Option<Duration> {
        self.items().get(item_id)?.deadline
    }

    fn config(&self) -> Result<&Config, HostCallError> {
        self.config.as_deref().ok_or(HostCallError::NotConfigured)
    }

    fn tokenizer(&self) -> Result<&TextTokenizer, HostCallError> {
        let config = self.config()?;
        opened(&self.tokenizer, || TextTokenizer::load(&config.model.path))
    }

    fn token_ids(&self, text: &str) -> Result<Vec<u32>, HostCallError> {
        self.tokenizer()?.encode(text).map_err(|error| failed(&error))
    }

    /// Without a configuration, uses the default dictionary.
    fn segmenter(&self) -> Result<&WordSegmenter, HostCallError> {
        let open = || match &self.config {
            Some(config) => WordSegmenter::open(&config.retrieval),
            None => Ok(WordSegmenter::default()),
        };
        opened(&self.segmenter, open)
    }

    fn embed(&self, texts: &[String], deadline: Option<Duration>) -> CallResult {
        let config = self.config()?;
        let (outside, runtime) = self.services.get().ok_or(HostCallError::NotConfigured)?;
        let open = || -> anyhow::Result<Option<TextEncoder>> {
            let models = local_models(&RetrievalConfig { rerank: Default::default(), ..config.retrieval.clone() })?;
            Ok(TextEncoder::open(&config.retrieval.embedding, &models, outside)?)
        };
        let encoder = opened(&self.encoder, open)?.as_ref().ok_or(HostCallError::NotConfigured)?;
        let known = || self.vectors.lock().unwrap_or_else(PoisonError::into_inner);
        let vector = |text: &String| -> Result<Vec<f32>, HostCallError> {
            let key = digest_hex(text.as_bytes());
            if let Some(vector) = known().get(&key) {
                return Ok(vector.clone());
            }
            let vector = runtime.block_on(within(deadline, encoder.embed(text))).map_err(missed)?;
            let mut known = known();
            if known.len() < MAX_VECTORS {
                known.insert(key, vector.clone());
            }
            Ok(vector)
        };
        Ok(HostResponse::Vectors(texts.iter().map(vector).collect::<Result<_, _>>()?))
    }
}

/// Opens a model at the first call.
fn opened<T, E: std::fmt::Display>(
    model: &Opened<T>,
    open: impl FnOnce() -> Result<T, E>,
) -> Result<&T, HostCallError> {
    let open = || open().map_err(|error| failure(&error));
    model.get_or_init(open).as_ref().map_err(|failure| HostCallError::Failed(failure.clone()))
}

fn failure(error: &dyn std::fmt::Display) -> CallFailure {
    CallFailure { kind: FailureKind::ServerError, message: error.to_string() }
}

fn missed(error: CallError) -> HostCallError {
    HostCallError::Failed(error.into_failure())
}

fn failed(error: &dyn std::fmt::Display) -> HostCallError {
    HostCallError::Failed(failure(error))
}

fn too_large(message: String) -> HostCallError {
    HostCallError::Failed(CallFailure { kind: FailureKind::Rejected, message })
}

fn request_bytes(request: &HostRequest) -> usize {
    let of_messages = |messages: &[Message]| messages.iter().map(|message| message.content.len()).sum();
    match request {
        HostRequest::CountTokens(text) | HostRequest::SplitTokens(text) | HostRequest::SegmentWords(text) => text.len(),
        HostRequest::Embed(texts) => texts.iter().map(String::len).sum(),
        HostRequest::AskJudge(messages) | HostRequest::ClassifyStyle(messages) => of_messages(messages),
    }
}

/// Size of the response in memory.
fn response_bytes(response: &HostResponse) -> usize {
    match response {
        HostResponse::Count(_) => size_of::<u32>(),
        HostResponse::Texts(texts) => texts.iter().map(|text| size_of::<String>() + text.len()).sum(),
        HostResponse::Vectors(vectors) => vectors.iter().map(|vector| size_of_val(vector.as_slice())).sum(),
        HostResponse::Text(text) => text.len(),
        HostResponse::Style(classes) => classes.iter().map(|class| size_of_val(class) + class.label.len()).sum(),
    }
}

impl HostFunctions for RunHostFunctions {
    /// A call that was already recorded for the item returns the recorded result, so that scoring again, to find a faulty episode, gives
    /// the same result.
    fn call(&self, plugin: &str, item_id: &str, request: &HostRequest) -> CallResult {
        let is_known = |call: &&HostCall| call.plugin == plugin && call.request == *request;
        let known = self.items().get(item_id).and_then(|item| item.calls.iter().find(is_known).cloned());
        if let Some(known) = known {
            return known.response;
        }
        let n_bytes = request_bytes(request);
        if n_bytes > MAX_REQUEST_BYTES {
            return Err(too_large(format!("the texts of the call have {n_bytes} bytes; at most {MAX_REQUEST_BYTES}")));
        }
        let response = self.answer(item_id, request);
        if let Some(item) = self.items().get_mut(item_id) {
            item.n_bytes += n_bytes + response.as_ref().map_or(0, response_bytes);
            if item.n_bytes > MAX_ITEM_BYTES {
                return Err(too_large(format!("the calls for one item have more than {MAX_ITEM_BYTES} bytes")));
            }
            let (plugin, request) = (plugin.to_owned(), request.clone());
            item.calls.push(HostCall { plugin, request, response: response.clone() });
        }
        response
    }
}

/// Host functions that return the recorded results of a run; a call that was not recorded fails.
#[derive(Debug, Default)]
pub struct RecordedCalls(HashMap<String, Vec<HostCall>>);

impl RecordedCalls {
    /// Adds the calls that were recorded for an item.
    pub fn add(&mut self, item_id: &str, calls: Vec<HostCall>) {
        if !calls.is_empty() {
            self.0.entry(item_id.to_owned()).or_default().extend(calls);
        }
    }

    /// Whether a result of a style model was recorded.
    pub fn has_style(&self) -> bool {
        self.0.values().flatten().any(|call| matches!(call.request, HostRequest::ClassifyStyle(_)))
    }

    /// Adds the calls that were recorded for an episode, which may include calls for its group.
    pub fn add_episode(&mut self, episode: &Episode, calls: Vec<HostCall>) {
        if episode.group_id != episode.id {
            self.add(&episode.group_id, calls.clone());
        }
        self.add(&episode.id, calls);
    }
}

impl HostFunctions for RecordedCalls {
    /// A result is a function of item and arguments, so a result recorded for another plugin is used, too.
    fn call(&self, plugin: &str, item_id: &str, request: &HostRequest) -> CallResult {
        let calls = self.0.get(item_id).map_or(&[][..], Vec::as_slice);
        let same = || calls.iter().filter(|call| call.request == *request);
        let call = same().find(|call| call.plugin == plugin).or_else(|| same().next());
        call.map_or_else(
            || {
                let message = format!("the recording of `{item_id}` has no result of this call");
                Err(HostCallError::Failed(CallFailure { kind: FailureKind::NotRecorded, message }))
            },
            |call| call.response.clone(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use querl_core::records::{Candidate, Completion};
    use std::path::Path;

    fn config() -> Config {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let model = root.join("examples/tiny-qwen3");
        let encoder = root.join("tests/reference/golden/encoders/bert-cls");
        let lexicon = root.join("examples/fivedoctors/lexicon.json");
        let toml = format!(
            "tenant = 'a'\n[data]\ninput = 'a.csv'\n[teacher]\nkind = 'recorded'\npath = 'a.jsonl'\n[model]\npath = {model:?}\n\
             [judge]\nkind = 'rubric'\n[retrieval]\nkind = 'none'\nlexicon = {lexicon:?}\n\
             embedding = {{ kind = 'local', path = {encoder:?} }}\n[plugins]\nprompt = {{ path = 'p' }}\nrewards = [{{ path = 'r' }}]\n"
        );
        toml::from_str(&toml).unwrap()
    }

    fn episode() -> Episode {
        let policy = Candidate::found_nothing("深海鱼油软胶囊 孕妇 禁忌人群".into());
        Episode {
            id: "a".into(), group_id: "a".into(), query: "那个孕妇能吃不".into(), policy, ..Episode::default()
        }
    }

    #[test]
    fn results_are_recorded_once_for_each_item_and_replayed() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let functions = RunHostFunctions::new(&config(), None);
        let message = Message { role: "user".into(), content: "打分".into() };
        let requests = [
            HostRequest::CountTokens("深海鱼油".into()),
            HostRequest::SplitTokens("深海鱼油".into()),
            HostRequest::SegmentWords("深海鱼油，孕妇能吃吗".into()),
            HostRequest::Embed(vec!["鱼油".into(), "孕妇".into()]),
            HostRequest::AskJudge(vec![message]),
            HostRequest::ClassifyStyle(Vec::new()),
        ];
        let unconnected = functions.call("p", "a", &requests[4]);
        assert_eq!(unconnected, Err(HostCallError::NotConfigured));
        functions.connect(ServiceContext::default(), runtime.handle().clone());
        functions.begin(&[episode()], None);
        let results: Vec<CallResult> = requests.iter().map(|request| functions.call("p", "a", request)).collect();
        let Ok(HostResponse::Texts(tokens)) = &results[1] else { panic!("{results:?}") };
        assert_eq!(results[0], Ok(HostResponse::Count(tokens.len() as u32)));
        let Ok(HostResponse::Texts(words)) = &results[2] else { panic!("{results:?}") };
        assert!(words.contains(&"孕妇".to_owned()) && !words.contains(&"，".to_owned()), "{words:?}");
        let Ok(HostResponse::Vectors(vectors)) = &results[3] else { panic!("{results:?}") };
        let length = |vector: &Vec<f32>| vector.iter().map(|value| value * value).sum::<f32>().sqrt();
        assert!(vectors.len() == 2 && vectors.iter().all(|vector| (length(vector) - 1.0).abs() < 1e-5));
        let Ok(HostResponse::Text(judged)) = &results[4] else { panic!("{results:?}") };
        assert!(judged.contains("综合得分"), "{judged}");
        assert_eq!(results[5], Err(HostCallError::NotConfigured));
        requests.iter().for_each(|request| drop(functions.call("p", "a", request)));
        functions.call("p", "of no item", &requests[0]).unwrap();
        let calls = functions.take_episode(&episode());
        assert_eq!(calls.iter().map(|call| call.request.clone()).collect::<Vec<_>>(), requests);
        assert!(functions.take("a").is_empty() && functions.take("of no item").is_empty());

        let mut recorded = RecordedCalls::default();
        recorded.add_episode(&episode(), calls);
        let replayed: Vec<CallResult> = requests.iter().map(|request| recorded.call("p", "a", request)).collect();
        assert_eq!(replayed, results);
        assert_eq!(recorded.call("another plugin", "a", &requests[0]), results[0]);
        for (item, request) in [("b", &requests[0]), ("a", &HostRequest::CountTokens("鱼".into()))] {
            let Err(HostCallError::Failed(failure)) = recorded.call("p", item, request) else { panic!() };
            assert_eq!(failure.kind, FailureKind::NotRecorded);
        }
    }

    struct SlowJudge;

    #[async_trait::async_trait]
    impl Judge for SlowJudge {
        async fn judge(&self, _: JudgeRequest<'_>) -> Result<Completion, CallFailure> {
            tokio::time::sleep(Duration::from_secs(60)).await;
            Ok(Completion::of("晚"))
        }

        fn name(&self) -> &str {
            "slow"
        }
    }

    #[test]
    fn a_call_of_the_judge_that_exceeds_the_deadline_is_a_timeout() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let functions = RunHostFunctions::new(&config(), None);
        assert!(functions.judge.set(Ok(Some(Arc::new(SlowJudge)))).is_ok());
        functions.connect(ServiceContext::default(), runtime.handle().clone());
        functions.begin(&[episode()], Some(Duration::from_millis(20)));
        let message = Message { role: "user".into(), content: "打分".into() };
        let request = HostRequest::AskJudge(vec![message]);
        let Err(HostCallError::Failed(failure)) = functions.call("p", "a", &request) else { panic!() };
        assert_eq!(failure.to_string(), "timeout: no response within rl.episode_deadline_ms = 20");
        let calls = functions.take_episode(&episode());
        assert_eq!(calls[0].response, Err(HostCallError::Failed(failure)));
    }

    #[test]
    fn texts_and_results_that_are_kept_are_bounded() {
        let functions = RunHostFunctions::new(&config(), None);
        functions.begin(&[episode()], None);
        let kind = |text: String| match functions.call("p", "a", &HostRequest::SegmentWords(text)) {
            Err(HostCallError::Failed(failure)) => Some(failure.kind),
            result => result.map(|_| None).unwrap(),
        };
        assert_eq!(kind("a".repeat(MAX_REQUEST_BYTES + 1)), Some(FailureKind::Rejected));
        let n_accepted = (0..16).take_while(|n| kind(format!("{n}{}", "a".repeat(600_000))).is_none()).count();
        assert_eq!(n_accepted, 3, "each call has its text and a word of the same size");
        assert_eq!(functions.take_episode(&episode()).len(), 3);
    }

    #[test]
    fn calls_of_a_group_are_recorded_with_its_first_episode() {
        let functions = RunHostFunctions::new(&config(), None);
        let [first, second] = ["g/0", "g/1"].map(|id| Episode { id: id.into(), group_id: "g".into(), ..episode() });
        functions.begin(&[first.clone(), second.clone()], None);
        let request = HostRequest::SegmentWords("鱼油".into());
        let result = functions.call("p", "g", &request);
        assert_eq!((functions.recorded(&first).len(), functions.recorded(&second).len()), (1, 1));
        let (of_first, of_second) = (functions.take_episode(&first), functions.take_episode(&second));
        assert_eq!((of_first.len(), of_second.len()), (1, 0));
        let mut recorded = RecordedCalls::default();
        recorded.add_episode(&first, of_first);
        assert_eq!(recorded.call("p", "g", &request), result);
    }
}
