//! What the contract lets a guest call, and what this host knows of it.
//!
//! Departure from the generated bindings: the functions are put into the linker here, so that each takes fuel for what passes. A
//! guest that does nothing but call the host would otherwise have the host work far longer than its own fuel says.

use crate::bindings::style_model::ClassifyError;
use crate::bindings::{log, types};
use crate::guest::{Classified, Guest, charge};
use querl_bundle::CONTRACT;
use wasmtime::component::types::{ComponentInstance, ComponentItem};
use wasmtime::component::{HasSelf, Linker};
use wasmtime::{Engine, Result, StoreContextMut};

/// Interfaces of the contract begin like this; a version follows.
pub(crate) const PREFIX: &str = "querl:plugin/";

/// What the version of a component begins with that this host runs: 0.1.x, up to what it knows of it.
fn series() -> String {
    format!("{}.{}.", CONTRACT.major, CONTRACT.minor)
}

/// Is `version` one that this host runs?
pub(crate) fn is_known(version: &str) -> bool {
    version.starts_with(&series())
}

/// What a guest may call: interface and function.
const OFFERED: [(&str, &str); 3] = [("settings", "get"), ("log", "log"), ("style-model", "classify")];

/// Puts everything that the contract offers into the linker.
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
    let said = store.data_mut().classify(turns)?;
    charge(&mut store, n_bytes_of(&said));
    Ok((said,))
}

fn n_bytes_of(said: &Classified) -> usize {
    match said {
        Ok(classes) => classes.iter().map(|class| size_of_val(class) + class.label.len()).sum(),
        Err(ClassifyError::Failed(failure)) => failure.message.len(),
        Err(ClassifyError::NotConfigured) => 0,
    }
}

/// Whether this host has what a component wants of the interface `name`, which begins with [`PREFIX`].
///
/// # Errors
/// A sentence: another version, or a function that a later 0.1.x added.
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

/// A component for another series than ours.
pub(crate) fn other_version(version: &str) -> String {
    format!("it was built for version {version} of the plugin contract; this host runs {}x", series())
}
