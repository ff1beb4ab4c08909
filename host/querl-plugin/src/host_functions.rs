//! The functions that guests import, linked by hand.
//!
//! Departure from generated bindings: each charges fuel for the bytes that it copies. Otherwise a guest that only calls the host could
//! use far more time than its fuel allows.

use crate::guest::{Guest, HostRefusal, charge};
use crate::log::Level;
use crate::series::{PREFIX, Series};
use crate::{v0_1, v0_2};
use querl_bundle::HostInterface;
use querl_core::ports::{HostFunctions, StyleModel};
use querl_core::records::{
    CallFailure, FailureKind, HostCallError, HostRequest, HostResponse, Message, StyleProbability,
};
use std::sync::Arc;
use wasmtime::component::{ComponentType, Lift, Linker, Lower};
use wasmtime::{Result, StoreContextMut};

/// Maximum number of texts per call of `similarity.embed`.
const MAX_EMBED_TEXTS: usize = 64;

#[derive(Debug, Clone, Copy, ComponentType, Lift)]
#[component(enum)]
#[repr(u8)]
#[allow(dead_code, reason = "made from what a guest passes")]
enum Role {
    #[component(name = "system")]
    System,
    #[component(name = "user")]
    User,
    #[component(name = "assistant")]
    Assistant,
}

/// `types.message`.
#[derive(ComponentType, Lift)]
#[component(record)]
struct Turn {
    role: Role,
    content: String,
}

/// `types.style-probability`.
#[derive(ComponentType, Lower)]
#[component(record)]
struct StyleClass {
    label: String,
    probability: f64,
}

/// Links the host functions of one series of the contract. The component's imports were checked before.
pub(crate) fn define(linker: &mut Linker<Guest>, series: Series) -> Result<()> {
    let name = |interface: &str| format!("{PREFIX}{interface}@{}", series.version());
    linker.instance(&name("types"))?;
    linker.instance(&name("settings"))?.func_wrap("get", get)?;
    linker.instance(&name("log"))?.func_wrap("log", write)?;
    let mut style = linker.instance(&name("style-model"))?;
    if series == Series::V0_1 {
        return style.func_wrap("classify", classify::<v0_1::CallError>);
    }
    style.func_wrap("classify", classify::<v0_2::CallError>)?;
    linker.instance(&name("calls"))?;
    let mut tokens = linker.instance(&name("tokens"))?;
    tokens.func_wrap("count", |store: StoreContextMut<'_, Guest>, (text,): (String,)| {
        let count = |response| if let HostResponse::Count(count) = response { Some(count) } else { None };
        answer::<_, v0_2::CallError>(store, HostInterface::Tokens, HostRequest::CountTokens(text), count)
    })?;
    tokens.func_wrap("split", |store: StoreContextMut<'_, Guest>, (text,): (String,)| {
        answer::<_, v0_2::CallError>(store, HostInterface::Tokens, HostRequest::SplitTokens(text), texts)
    })?;
    let mut words = linker.instance(&name("words"))?;
    words.func_wrap("segment", |store: StoreContextMut<'_, Guest>, (text,): (String,)| {
        answer::<_, v0_2::CallError>(store, HostInterface::Words, HostRequest::SegmentWords(text), texts)
    })?;
    let mut similarity = linker.instance(&name("similarity"))?;
    similarity.func_wrap("embed", |store: StoreContextMut<'_, Guest>, (texts,): (Vec<String>,)| {
        if texts.len() > MAX_EMBED_TEXTS {
            let message =
                format!("called `similarity.embed` with {} texts; expected at most {MAX_EMBED_TEXTS}", texts.len());
            return Err(HostRefusal(message).into());
        }
        let vectors = |response| if let HostResponse::Vectors(vectors) = response { Some(vectors) } else { None };
        answer::<_, v0_2::CallError>(store, HostInterface::Similarity, HostRequest::Embed(texts), vectors)
    })?;
    let mut judge = linker.instance(&name("judge"))?;
    judge.func_wrap("ask", |store: StoreContextMut<'_, Guest>, (turns,): (Vec<Turn>,)| {
        let text = |response| if let HostResponse::Text(text) = response { Some(text) } else { None };
        answer::<_, v0_2::CallError>(store, HostInterface::Judge, HostRequest::AskJudge(messages(turns)), text)
    })
}

fn get(mut store: StoreContextMut<'_, Guest>, (key,): (String,)) -> Result<(Option<String>,)> {
    let n_key_bytes = key.len();
    let value = store.data_mut().setting(key);
    charge(&mut store, n_key_bytes + value.as_ref().map_or(0, String::len));
    Ok((value,))
}

fn write(mut store: StoreContextMut<'_, Guest>, (level, message): (Level, String)) -> Result<()> {
    charge(&mut store, message.len());
    store.data_mut().log(level, &message);
    Ok(())
}

type Answered<T, E> = Result<(std::result::Result<T, E>,)>;

fn classify<E: From<HostCallError>>(
    store: StoreContextMut<'_, Guest>,
    (turns,): (Vec<Turn>,),
) -> Answered<Vec<StyleClass>, E> {
    let classes = |response| {
        let HostResponse::Style(classes) = response else { return None };
        let class = |StyleProbability { label, probability }| StyleClass { label, probability };
        Some(classes.into_iter().map(class).collect())
    };
    answer(store, HostInterface::StyleModel, HostRequest::ClassifyStyle(messages(turns)), classes)
}

/// Calls the host function and charges the bytes of the request and of the response.
fn answer<T, E: From<HostCallError>>(
    mut store: StoreContextMut<'_, Guest>,
    interface: HostInterface,
    request: HostRequest,
    read: impl FnOnce(HostResponse) -> Option<T>,
) -> Answered<T, E> {
    charge(&mut store, request_bytes(&request));
    let response = store.data_mut().call_host(interface, &request)?;
    charge(&mut store, response_bytes(&response));
    let response = response.and_then(|response| {
        read(response).ok_or_else(|| {
            let message = "internal error: the host's result is of another function; please report it".into();
            HostCallError::Failed(CallFailure { kind: FailureKind::InvalidResponse, message })
        })
    });
    Ok((response.map_err(E::from),))
}

fn texts(response: HostResponse) -> Option<Vec<String>> {
    if let HostResponse::Texts(texts) = response { Some(texts) } else { None }
}

fn messages(turns: Vec<Turn>) -> Vec<Message> {
    let message = |Turn { role, content }| {
        let role = match role {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        };
        Message { role: role.to_owned(), content }
    };
    turns.into_iter().map(message).collect()
}

fn request_bytes(request: &HostRequest) -> usize {
    let of_texts = |texts: &[String]| texts.iter().map(|text| size_of_val(text) + text.len()).sum();
    match request {
        HostRequest::CountTokens(text) | HostRequest::SplitTokens(text) | HostRequest::SegmentWords(text) => text.len(),
        HostRequest::Embed(texts) => of_texts(texts),
        HostRequest::AskJudge(turns) | HostRequest::ClassifyStyle(turns) => {
            turns.iter().map(|turn| size_of::<Turn>() + turn.content.len()).sum()
        }
    }
}

fn response_bytes(response: &std::result::Result<HostResponse, HostCallError>) -> usize {
    match response {
        Ok(HostResponse::Count(_)) | Err(HostCallError::NotConfigured) => 0,
        Ok(HostResponse::Texts(texts)) => texts.iter().map(|text| size_of_val(text) + text.len()).sum(),
        Ok(HostResponse::Vectors(vectors)) => vectors.iter().map(|vector| size_of_val(&vector[..])).sum(),
        Ok(HostResponse::Text(text)) => text.len(),
        Ok(HostResponse::Style(classes)) => classes.iter().map(|class| size_of_val(class) + class.label.len()).sum(),
        Err(HostCallError::Failed(failure)) => failure.message.len(),
    }
}

/// Host functions for a style scorer: a style model, and nothing else.
pub(crate) struct OnlyStyleModel(pub(crate) Arc<dyn StyleModel>);

impl HostFunctions for OnlyStyleModel {
    fn call(&self, _: &str, _: &str, request: &HostRequest) -> std::result::Result<HostResponse, HostCallError> {
        match request {
            HostRequest::ClassifyStyle(turns) => {
                self.0.classify(turns).map(HostResponse::Style).map_err(HostCallError::Failed)
            }
            _ => Err(HostCallError::NotConfigured),
        }
    }
}
