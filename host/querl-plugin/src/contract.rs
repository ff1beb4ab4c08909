//! The host functions of the contract, and which versions of it this host runs.
//!
//! Departure from the generated bindings: the functions are linked here, so that each charges fuel for the bytes that it copies.
//! Otherwise a guest that only calls the host could use far more time than its fuel allows.

use crate::bindings::style_model::ClassifyError;
use crate::bindings::{log, types};
use crate::guest::{Classified, Guest, charge};
use querl_bundle::CONTRACT;
use wasmtime::component::types::{ComponentInstance, ComponentItem};
use wasmtime::component::{HasSelf, Linker};
use wasmtime::{Engine, Result, StoreContextMut};

/// Interfaces of the contract begin like this; a version follows.
pub(crate) const PREFIX: &str = "querl:plugin/";

/// Prefix of the contract versions that this host runs: 0.1.x.
fn series() -> String {
    format!("{}.{}.", CONTRACT.major, CONTRACT.minor)
}

pub(crate) fn is_known(version: &str) -> bool {
    version.starts_with(&series())
}

/// Host functions: interface and function.
const OFFERED: [(&str, &str); 3] = [("settings", "get"), ("log", "log"), ("style-model", "classify")];

pub(crate) fn define(linker: &mut Linker<Guest>) -> Result<()> {
    types::add_to_linker::<_, HasSelf<Guest>>(linker, |guest| guest)?;
    let name = |interface: &str| format!("{PREFIX}{interface}@{CONTRACT}");
    linker.instance(&name("settings"))?.func_wrap("get", get)?;
    linker.instance(&name("log"))?.func_wrap("log", write)?;
    linker.instance(&name("style-model"))?.func_wrap("classify", classify)
}

fn get(mut store: StoreContextMut<'_, Guest>, (key,): (String,)) -> Result<(Option<String>,)> {
    let n_key_bytes = key.len();
    let value = store.data_mut().setting(key);
    charge(&mut store, n_key_bytes + value.as_ref().map_or(0, String::len));
    Ok((value,))
}

fn write(mut store: StoreContextMut<'_, Guest>, (level, message): (log::Level, String)) -> Result<()> {
    charge(&mut store, message.len());
    store.data_mut().log(level, &message);
    Ok(())
}

fn classify(mut store: StoreContextMut<'_, Guest>, (turns,): (Vec<types::MessageResult>,)) -> Result<(Classified,)> {
    charge(&mut store, turns.iter().map(|turn| size_of_val(turn) + turn.content.len()).sum());
    let classified = store.data_mut().classify(turns)?;
    charge(&mut store, n_bytes_of(&classified));
    Ok((classified,))
}

fn n_bytes_of(message: &Classified) -> usize {
    match message {
        Ok(classes) => classes.iter().map(|class| size_of_val(class) + class.label.len()).sum(),
        Err(ClassifyError::Failed(failure)) => failure.message.len(),
        Err(ClassifyError::NotConfigured) => 0,
    }
}

/// Checks that this host has the functions that a component imports from the interface `name`, which begins with [`PREFIX`].
pub(crate) fn check_import(engine: &Engine, name: &str, wanted: &ComponentInstance) -> Result<(), String> {
    let Some((interface, version)) = name[PREFIX.len()..].split_once('@') else {
        return Err(format!("it imports `{name}` without a version"));
    };
    if !is_known(version) {
        return Err(other_version(version));
    }
    let is_function = |item: &ComponentItem| matches!(item, ComponentItem::ComponentFunc(_));
    let mut functions = wanted.exports(engine).filter(|(_, item)| is_function(&item.ty)).map(|(function, _)| function);
    match functions.find(|function| !OFFERED.contains(&(interface, *function))) {
        None => Ok(()),
        Some(function) => Err(format!(
            "it calls `{function}` of `{name}`, which this host, of contract {CONTRACT}, does not offer; use a newer querl, or \
             build the plugin for contract {CONTRACT}"
        )),
    }
}

/// The message for a component of another contract series.
pub(crate) fn other_version(version: &str) -> String {
    format!("it was built for version {version} of the plugin contract; this host runs {}x", series())
}
