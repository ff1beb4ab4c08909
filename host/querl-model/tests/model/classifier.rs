//! Classifiers compared with transformers and PEFT (tests/reference/classifiers.py).

use crate::{golden, json as json_file};
use querl_core::config::BaseDtype;
use querl_model::classifier::{
    BatchLimits, BatchStats, Batcher, Classification, Classifier, ClassifierTokenizer, Labels, MAX_UNSPLIT_TEXTS,
    QueueError, RequestCallback, Tuning,
};
use querl_model::{LoraSettings, Pass, Weights, is_adapter};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

const DTYPE: BaseDtype = BaseDtype::F32;
const LABELS: [&str; 5] = ["售前", "售后", "诚实", "有帮助", "无伤害"];

struct Expected {
    texts: Vec<Vec<u32>>,
    logits: Vec<Vec<f64>>,
}

fn expected(name: &str) -> Expected {
    let file = json_file(&golden("classifiers").join(name).join("golden.json"));
    Expected {
        texts: serde_json::from_value(file["texts"].clone()).unwrap(),
        logits: serde_json::from_value(file["logits"].clone()).unwrap(),
    }
}

fn logits(classifier: &Classifier, texts: &[Vec<u32>], tokens_per_pass: usize) -> Vec<Vec<f64>> {
    let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    classifier.logits_of_all(&texts, tokens_per_pass).unwrap()
}

fn assert_near(found: &[Vec<f64>], expected: &[Vec<f64>], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() < tolerance, "{found} is not {expected}");
    }
}

fn loaded(name: &str) -> Classifier {
    Classifier::load(&golden("classifiers").join(name), Weights::Frozen, DTYPE).unwrap()
}

/// A new classifier with [`LABELS`] on a base.
fn fresh(base: &Path, tuning: &Tuning) -> Classifier {
    let labels = Labels::new(LABELS.map(str::to_owned).to_vec(), None).unwrap();
    Classifier::fresh(base, labels, tuning, (DTYPE, 3)).unwrap()
}

#[test]
fn logits_are_those_of_transformers_from_safetensors_and_from_pickled_weights() {
    for name in ["qwen2", "qwen3"] {
        let (classifier, expected) = (loaded(name), expected(name));
        assert_eq!(classifier.labels().names(), LABELS, "{name}");
        assert_near(&logits(&classifier, &expected.texts, 1000), &expected.logits, 1e-4);
    }
}

#[test]
fn logits_with_pefts_adapter_and_head_are_those_of_peft() {
    let (base, adapter) = (golden("decoders/qwen3-tied"), golden("classifiers/qwen3-peft"));
    let (classifier, expected) = (Classifier::load_adapted(&base, &adapter, DTYPE).unwrap(), expected("qwen3-peft"));
    assert_near(&logits(&classifier, &expected.texts, 1000), &expected.logits, 1e-4);
}

#[test]
fn what_a_text_comes_with_does_not_change_its_logits() {
    let (classifier, expected) = (loaded("qwen2"), expected("qwen2"));
    let together = logits(&classifier, &expected.texts, 1000);
    assert_near(&logits(&classifier, &expected.texts, 8), &together, 1e-5);
    for (text, row) in expected.texts.iter().zip(&together) {
        assert_near(&logits(&classifier, std::slice::from_ref(text), 1000), std::slice::from_ref(row), 1e-5);
        let padded = [text.as_slice(), &[0, 0, 0]].concat();
        assert_near(&logits(&classifier, &[padded], 1000), std::slice::from_ref(row), 1e-5);
    }
}

#[test]
fn a_whole_classifier_and_one_with_an_adapter_are_read_as_they_were_written() {
    let (base, texts, folder) =
        (golden("decoders/qwen2-untied"), expected("qwen2").texts, tempfile::tempdir().unwrap());
    let whole = fresh(&base, &Tuning::Full);
    assert!(whole.vars().contains_key("score.weight") && !whole.vars().contains_key("lm_head.weight"));
    whole.save(folder.path(), &base).unwrap();
    let again = Classifier::load(folder.path(), Weights::Frozen, DTYPE).unwrap();
    assert_near(&logits(&again, &texts, 1000), &logits(&whole, &texts, 1000), 1e-6);
    let config = json_file(&folder.path().join("config.json"));
    assert_eq!(config["architectures"][0], "Qwen2ForSequenceClassification");
    assert_eq!((&config["id2label"]["3"], &config["label2id"]["无伤害"]), (&"有帮助".into(), &4.into()));

    let adapter = tempfile::tempdir().unwrap();
    let adapted = fresh(&base, &Tuning::Lora(LoraSettings::all_linear(4, 8.0)));
    adapted.save(adapter.path(), &base).unwrap();
    let again = Classifier::load_adapted(&base, adapter.path(), DTYPE).unwrap();
    assert_near(&logits(&again, &texts, 1000), &logits(&adapted, &texts, 1000), 1e-6);
    let settings = json_file(&adapter.path().join("adapter_config.json"));
    assert_eq!((&settings["task_type"], &settings["modules_to_save"][0]), (&"SEQ_CLS".into(), &"score".into()));
}

#[test]
fn folders_without_a_classifier_are_errors() {
    let error = |directory: &Path| match Classifier::load(directory, Weights::Frozen, DTYPE) {
        Ok(_) => panic!("loaded"),
        Err(error) => error.to_string(),
    };
    let found = error(&golden("decoders/qwen2-tied"));
    assert!(found.contains("no `id2label` there; a classifier names its classes"), "{found}");
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("classifiers/qwen2").join(file), folder.path().join(file)).unwrap();
    }
    let path = folder.path().join("config.json");
    let whole = json_file(&path);
    let changed = |key: &str, value: Value| {
        let mut file = whole.clone();
        file[key] = value;
        std::fs::write(&path, file.to_string()).unwrap();
        error(folder.path())
    };
    let found = changed("id2label", json!({"0": "a", "1": "b"}));
    assert!(found.contains("`score.weight` has shape [5, 32]; the 2 labels"), "{found}");
    let found = changed("architectures", json!(["BertModel"]));
    assert!(found.contains("architecture `BertModel` is not supported"), "{found}");
    let found = changed("problem_type", "regression".into());
    assert!(found.contains("`problem_type` is `regression`; expected `single_label_classification`"), "{found}");
    std::fs::write(folder.path().join("label_mapping.json"), r#"{"id_to_label": {"0": "a", "1": "b"}}"#).unwrap();
    let found = changed("problem_type", Value::Null);
    assert!(found.contains("id 0 is `a` here and `售前` in `config.json`"), "{found}");
}

#[test]
fn damaged_or_misshapen_pickled_weights_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let source = golden("classifiers/qwen3");
    for file in ["config.json", "label_mapping.json", "pytorch_model.bin"] {
        std::fs::copy(source.join(file), folder.path().join(file)).unwrap();
    }
    let error = || Classifier::load(folder.path(), Weights::Frozen, DTYPE).map(drop).unwrap_err().to_string();
    let path = folder.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["intermediate_size"] = 40.into();
    std::fs::write(&path, config.to_string()).unwrap();
    let found = error();
    assert!(found.contains("pytorch_model.bin") && found.contains("config.json makes it [40, 32]"), "{found}");
    std::fs::write(&path, text).unwrap();
    let pickled = folder.path().join("pytorch_model.bin");
    let bytes = std::fs::read(&pickled).unwrap();
    std::fs::write(&pickled, &bytes[..bytes.len() / 2]).unwrap();
    assert!(error().contains("pytorch_model.bin"), "{}", error());
}

#[test]
fn a_folder_that_was_written_before_is_read_as_what_was_written_last() {
    let (base, texts, folder) =
        (golden("decoders/qwen2-untied"), expected("qwen2").texts, tempfile::tempdir().unwrap());
    let adapted = fresh(&base, &Tuning::Lora(LoraSettings::all_linear(4, 8.0)));
    let whole = fresh(&base, &Tuning::Full);
    adapted.save(folder.path(), &base).unwrap();
    whole.save(folder.path(), &base).unwrap();
    assert!(!is_adapter(folder.path()));
    let again = Classifier::load(folder.path(), Weights::Frozen, DTYPE).unwrap();
    assert_near(&logits(&again, &texts, 1000), &logits(&whole, &texts, 1000), 1e-6);
    adapted.save(folder.path(), &base).unwrap();
    assert!(is_adapter(folder.path()) && !folder.path().join("config.json").exists());
    let error = again.save(folder.path(), &base).unwrap_err().to_string();
    assert!(error.contains("frozen weights is not written again"), "{error}");
    let error = whole.save(&base, &base).unwrap_err().to_string();
    assert!(error.contains("the model that is trained stands there"), "{error}");
}

/// Saving activations would take as much memory in inference as in training.
#[test]
fn a_view_without_gradient_records_none_and_follows_training() {
    let trained = fresh(&golden("decoders/qwen2-untied"), &Tuning::Full);
    let view = trained.without_gradient();
    let texts = expected("qwen2").texts;
    let views: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    let pass = Pass::with(None);
    assert!(trained.logits(&views, &pass).unwrap().track_op());
    assert!(!view.logits(&views, &pass).unwrap().track_op());
    for var in trained.vars().values() {
        var.set(&(var.as_tensor() * 1.5).unwrap()).unwrap();
    }
    // Layers without recorded operations run as one operation: the results differ by rounding only.
    let found = |classifier: &Classifier| {
        let rows = classifier.logits(&views, &pass).unwrap().to_vec2::<f32>().unwrap();
        rows.into_iter().map(|row| row.into_iter().map(f64::from).collect()).collect::<Vec<Vec<f64>>>()
    };
    assert_near(&found(&view), &found(&trained), 1e-5);
}

#[test]
fn of_a_long_dialogue_question_and_answer_are_kept() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tiny-qwen3");
    let whole = ClassifierTokenizer::load(&folder, 1000).unwrap();
    let cut = ClassifierTokenizer::load(&folder, 20).unwrap();
    let ids = |text: &str| whole.encode(text).unwrap().ids;
    let (question, answer) = (format!("用户问题：{}", "为什么贵".repeat(9)), format!("\n回答：{}", "用料好".repeat(9)));
    let (of_question, of_answer) = (ids(&question), ids(&answer));
    assert!(of_question.len() > 20 && of_answer.len() > 20);
    let found = cut.encode(&format!("{question}{answer}")).unwrap();
    assert_eq!(found.ids, [&of_question[..5], &of_answer[..15]].concat());
    assert_eq!(found.n_left_out, ids(&format!("{question}{answer}")).len() - 20);
    // With a short answer the question keeps more than a quarter of the tokens.
    let short = ids("\n回答：好");
    let found = cut.encode(&format!("{question}\n回答：好")).unwrap();
    assert_eq!(found.ids, [&of_question[..20 - short.len()], &short].concat());
    // A text that is not a dialogue is truncated at its end, and so is a dialogue without room for question and answer.
    let plain = "今天天气很好".repeat(9);
    assert_eq!(cut.encode(&plain).unwrap().ids, ids(&plain)[..20]);
    let tight = ClassifierTokenizer::load(&folder, 7).unwrap();
    assert_eq!(tight.encode(&format!("{question}{answer}")).unwrap().ids, of_question[..7]);
    assert_eq!(cut.encode("好").unwrap().n_left_out, 0);
}

/// A new classifier of the small model that comes with the repository, and its tokenizer.
fn small() -> (Classifier, ClassifierTokenizer) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tiny-qwen3");
    (fresh(&folder, &Tuning::Full), ClassifierTokenizer::load(&folder, 64).unwrap())
}

fn limits(max_texts: usize, max_waiting: usize) -> BatchLimits {
    BatchLimits { max_texts, tokens_per_pass: 512, max_waiting }
}

#[test]
fn texts_of_many_callers_have_the_logits_that_they_have_alone() {
    let texts: Vec<String> =
        (0..24).map(|n| format!("用户问题：第{n}件怎么洗？\n回答：{}", "冷水手洗。".repeat(1 + n % 5))).collect();
    let (classifier, tokenizer) = small();
    let alone: Vec<Vec<f64>> = texts
        .iter()
        .map(|text| classifier.logits_of_all(&[&tokenizer.encode(text).unwrap().ids], 512).unwrap().remove(0))
        .collect();
    let done = Arc::new(Mutex::new(Vec::<BatchStats>::new()));
    let seen = done.clone();
    let observer = Box::new(move |batch| seen.lock().unwrap().push(batch));
    let (batcher, worker) = Batcher::new(classifier, tokenizer, limits(8, 1000), observer);
    let working = std::thread::spawn(|| worker.run());
    std::thread::scope(|scope| {
        for (texts, alone) in texts.chunks(3).zip(alone.chunks(3)) {
            let batcher = &batcher;
            scope.spawn(move || {
                let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                let found = batcher.classify(&texts).unwrap();
                let logits: Vec<Vec<f64>> = found.into_iter().map(|found| found.logits).collect();
                assert_near(&logits, alone, 1e-5);
            });
        }
    });
    assert_eq!(batcher.n_waiting(), 0);
    drop(batcher);
    working.join().unwrap();
    let done = done.lock().unwrap();
    assert_eq!(
        done.iter().map(|batch| (batch.n_requests, batch.n_texts)).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1)),
        (8, 24)
    );
}

#[test]
fn a_full_queue_rejects_requests() {
    let (classifier, tokenizer) = small();
    let (batcher, worker) = Batcher::new(classifier, tokenizer, limits(1, 1), Box::new(|_| ()));
    std::thread::spawn(|| worker.run());
    let release = hold_up(&batcher);
    batcher.submit(&["二"], TestCallback::nobody()).unwrap();
    let refused = batcher.submit(&["三"], TestCallback::nobody()).unwrap_err();
    assert!(matches!(refused, QueueError::Busy { n_waiting: 1 }), "{refused}");
    // Rejected before tokenization: a text without tokens makes no difference.
    assert!(matches!(batcher.submit(&[""], TestCallback::nobody()).unwrap_err(), QueueError::Busy { .. }));
    release.send(()).unwrap();
    until_idle(&batcher);
    assert!(matches!(batcher.submit(&[""], TestCallback::nobody()).unwrap_err(), QueueError::Text(_)));
    assert_eq!(batcher.n_waiting(), 0, "what is refused gives its room back");
    assert_eq!(batcher.classify(&["四"]).map(|found| found.len()), Ok(1));
}

struct TestCallback {
    is_active: bool,
    hear: Box<dyn FnOnce(usize) + Send>,
}

impl TestCallback {
    fn by(hear: impl FnOnce(usize) + Send + 'static) -> Box<dyn RequestCallback> {
        Box::new(Self { is_active: true, hear: Box::new(hear) })
    }

    fn nobody() -> Box<dyn RequestCallback> {
        Self::by(|_| ())
    }
}

impl RequestCallback for TestCallback {
    fn is_active(&self) -> bool {
        self.is_active
    }

    fn on_results(self: Box<Self>, found: Result<Vec<Classification>, String>) {
        (self.hear)(found.unwrap().len());
    }
}

/// Blocks the worker thread until something is sent.
fn hold_up(batcher: &Batcher) -> Sender<()> {
    let (release, held) = channel::<()>();
    let (began, begun) = channel();
    let answer = TestCallback::by(move |_| {
        began.send(()).unwrap();
        held.recv().unwrap();
    });
    batcher.submit(&["一"], answer).unwrap();
    begun.recv().unwrap();
    release
}

fn until_idle(batcher: &Batcher) {
    while batcher.n_waiting() > 0 {
        std::thread::yield_now();
    }
}

/// Number of requests and of texts of each batch.
type Batches = Arc<Mutex<Vec<(usize, usize)>>>;

fn with_batches(max_texts: usize) -> (Batcher, Batches) {
    let (classifier, tokenizer) = small();
    let done = Arc::new(Mutex::new(Vec::new()));
    let seen = done.clone();
    let observer = Box::new(move |batch: BatchStats| seen.lock().unwrap().push((batch.n_requests, batch.n_texts)));
    let (batcher, worker) = Batcher::new(classifier, tokenizer, limits(max_texts, 1000), observer);
    std::thread::spawn(|| worker.run());
    (batcher, done)
}

/// Regression: the server classified texts that their clients had given up, and delayed those of clients that still waited.
#[test]
fn a_text_without_a_waiting_client_is_skipped() {
    let (batcher, done) = with_batches(8);
    let release = hold_up(&batcher);
    let gone = TestCallback { is_active: false, hear: Box::new(|_| panic!("the request was cancelled")) };
    batcher.submit(&["二", "三", "四"], Box::new(gone)).unwrap();
    let (heard, hears) = channel();
    batcher.submit(&["五"], TestCallback::by(move |n| heard.send(n).unwrap())).unwrap();
    assert_eq!(batcher.n_waiting(), 4);
    release.send(()).unwrap();
    assert_eq!(hears.recv().unwrap(), 1);
    until_idle(&batcher);
    assert_eq!(*done.lock().unwrap(), [(1, 1), (1, 1)]);
}

#[test]
fn a_short_request_has_its_turn_between_two_parts_of_a_long_one() {
    let (batcher, done) = with_batches(8);
    let release = hold_up(&batcher);
    let (heard, hears) = channel();
    let (long, short) = (heard.clone(), heard);
    batcher.submit(&["长"; 3 * MAX_UNSPLIT_TEXTS], TestCallback::by(move |n| long.send(n).unwrap())).unwrap();
    batcher.submit(&["短"], TestCallback::by(move |n| short.send(n).unwrap())).unwrap();
    release.send(()).unwrap();
    assert_eq!((hears.recv().unwrap(), hears.recv().unwrap()), (1, 3 * MAX_UNSPLIT_TEXTS));
    assert_eq!(
        *done.lock().unwrap(),
        [(1, 1), (1, MAX_UNSPLIT_TEXTS), (2, 1 + MAX_UNSPLIT_TEXTS), (1, MAX_UNSPLIT_TEXTS)]
    );
}

#[test]
fn requests_to_a_worker_that_has_ended_are_errors() {
    let (classifier, tokenizer) = small();
    let (batcher, worker) = Batcher::new(classifier, tokenizer, limits(8, 8), Box::new(|_| ()));
    assert!(batcher.is_alive());
    drop(worker);
    assert!(!batcher.is_alive());
    assert_eq!(batcher.classify(&["一"]).unwrap_err(), "the classifier has ended");
    assert_eq!(batcher.n_waiting(), 0);
}
