//! Replacements for the host functions in native tests.

use super::form::{HostCallForm, HostRequestForm, HostResponseForm};
use crate::host::CallError;
use crate::{CallFailure, FailureKind, Message, StyleProbability};
use std::cell::RefCell;
use std::rc::Rc;

type Function<I, O> = Option<Box<dyn Fn(&I) -> Result<O, CallError>>>;

/// Replacements for the functions of [`crate::host`] on this thread. A function without a replacement fails as not configured.
///
/// ```
/// use querl_sdk::{host, testing::HostFunctions};
///
/// let functions = HostFunctions::default().words(|text| Ok(text.split(' ').map(str::to_owned).collect()));
/// let _installed = functions.install();
/// assert_eq!(host::words("深海 鱼油").unwrap(), ["深海", "鱼油"]);
/// assert!(host::count_tokens("鱼油").is_err());
/// ```
#[derive(Default)]
pub struct HostFunctions {
    count_tokens: Function<str, u32>,
    split_tokens: Function<str, Vec<String>>,
    words: Function<str, Vec<String>>,
    embed: Function<[String], Vec<Vec<f32>>>,
    ask_judge: Function<[Message], String>,
    classify: Function<[Message], Vec<StyleProbability>>,
}

impl HostFunctions {
    /// Sets the tokenizer, for `split_tokens` and `count_tokens`.
    #[must_use]
    pub fn tokens(mut self, split: impl Fn(&str) -> Result<Vec<String>, CallError> + 'static) -> Self {
        let split = Rc::new(split);
        let counted = split.clone();
        self.count_tokens = Some(Box::new(move |text| counted(text).map(|tokens| tokens.len() as u32)));
        self.split_tokens = Some(Box::new(move |text| split(text)));
        self
    }

    /// Sets the word segmentation.
    #[must_use]
    pub fn words(mut self, segment: impl Fn(&str) -> Result<Vec<String>, CallError> + 'static) -> Self {
        self.words = Some(Box::new(segment));
        self
    }

    /// Sets the text encoder.
    #[must_use]
    pub fn embed(mut self, embed: impl Fn(&[String]) -> Result<Vec<Vec<f32>>, CallError> + 'static) -> Self {
        self.embed = Some(Box::new(embed));
        self
    }

    /// Sets the judge.
    #[must_use]
    pub fn ask_judge(mut self, ask: impl Fn(&[Message]) -> Result<String, CallError> + 'static) -> Self {
        self.ask_judge = Some(Box::new(ask));
        self
    }

    /// Sets the style model that rewards call.
    #[must_use]
    pub fn classify(
        mut self,
        classify: impl Fn(&[Message]) -> Result<Vec<StyleProbability>, CallError> + 'static,
    ) -> Self {
        self.classify = Some(Box::new(classify));
        self
    }

    /// Replacements that return recorded results. A call that was not recorded fails.
    pub(crate) fn recorded(calls: Vec<HostCallForm>) -> Self {
        let calls = &Rc::new(calls);
        let texts = |response: &HostResponseForm| match response {
            HostResponseForm::Texts(texts) => Some(texts.clone()),
            _ => None,
        };
        Self {
            count_tokens: recorded(
                calls,
                |text: &str| HostRequestForm::CountTokens(text.to_owned()),
                |response| if let HostResponseForm::Count(count) = response { Some(*count) } else { None },
            ),
            split_tokens: recorded(calls, |text: &str| HostRequestForm::SplitTokens(text.to_owned()), texts),
            words: recorded(calls, |text: &str| HostRequestForm::SegmentWords(text.to_owned()), texts),
            embed: recorded(
                calls,
                |texts: &[String]| HostRequestForm::Embed(texts.to_vec()),
                |response| if let HostResponseForm::Vectors(vectors) = response { Some(vectors.clone()) } else { None },
            ),
            ask_judge: recorded(
                calls,
                |messages: &[Message]| HostRequestForm::AskJudge(messages.to_vec()),
                |response| if let HostResponseForm::Text(text) = response { Some(text.clone()) } else { None },
            ),
            classify: recorded(
                calls,
                |turns: &[Message]| HostRequestForm::ClassifyStyle(turns.to_vec()),
                |response| if let HostResponseForm::Style(classes) = response { Some(classes.clone()) } else { None },
            ),
        }
    }

    /// Uses these replacements for calls of this thread until the returned guard is dropped.
    #[must_use = "the functions are there until this is dropped"]
    pub fn install(self) -> InstalledHostFunctions {
        InstalledHostFunctions { before: Some(FUNCTIONS.replace(self)) }
    }
}

/// A replacement that returns the result of the first recorded call with the same request. `request` converts the argument to the
/// recorded form; `read` returns `None` for the response of another function.
fn recorded<I: ?Sized + 'static, O: 'static>(
    calls: &Rc<Vec<HostCallForm>>,
    request: impl Fn(&I) -> HostRequestForm + 'static,
    read: impl Fn(&HostResponseForm) -> Option<O> + 'static,
) -> Function<I, O> {
    let calls = calls.clone();
    Some(Box::new(move |input| {
        let request = request(input);
        let result = match calls.iter().find(|call| call.request == request).map(|call| &call.response) {
            Some(Ok(response)) => read(response),
            Some(Err(error)) => return Err(error.into()),
            None => None,
        };
        result.ok_or_else(|| {
            let message = "the recording has no result for this call".to_owned();
            CallError::Failed(CallFailure { kind: FailureKind::NotRecorded, message })
        })
    }))
}

/// Guard of [`HostFunctions::install`]. Dropping it restores the previous replacements.
pub struct InstalledHostFunctions {
    before: Option<HostFunctions>,
}

impl Drop for InstalledHostFunctions {
    fn drop(&mut self) {
        FUNCTIONS.set(self.before.take().unwrap_or_default());
    }
}

thread_local! {
    static FUNCTIONS: RefCell<HostFunctions> = RefCell::default();
}

fn call<I: ?Sized, O>(of: impl FnOnce(&HostFunctions) -> &Function<I, O>, input: &I) -> Result<O, CallError> {
    FUNCTIONS.with_borrow(|functions| match of(functions) {
        Some(function) => function(input),
        None => Err(CallError::NotConfigured),
    })
}

pub(crate) fn count_tokens(text: &str) -> Result<u32, CallError> {
    call(|functions| &functions.count_tokens, text)
}

pub(crate) fn split_tokens(text: &str) -> Result<Vec<String>, CallError> {
    call(|functions| &functions.split_tokens, text)
}

pub(crate) fn words(text: &str) -> Result<Vec<String>, CallError> {
    call(|functions| &functions.words, text)
}

pub(crate) fn embed(texts: &[String]) -> Result<Vec<Vec<f32>>, CallError> {
    call(|functions| &functions.embed, texts)
}

pub(crate) fn ask_judge(messages: &[Message]) -> Result<String, CallError> {
    call(|functions| &functions.ask_judge, messages)
}

pub(crate) fn classify(turns: &[Message]) -> Result<Vec<StyleProbability>, CallError> {
    call(|functions| &functions.classify, turns)
}
