//! The WASI functions that guests can call. Standard libraries import them whether a plugin needs them or not.
//!
//! Departures from `wasmtime-wasi`, which is not used:
//! 1. No call blocks. There, a guest's sleep blocks the calling thread without limit, since fuel and epochs do not interrupt host
//!    code, and a write to stderr panics when the caller is a worker of an async runtime.
//! 2. Files, sockets, arguments and environment do not exist, instead of being empty. A call that needs them ends the instance
//!    with a fault that names the call.
//! 3. Clocks always return 0, and random numbers are a fixed sequence that restarts with each instance.

use crate::guest::{Guest, HostRefusal, charge};
use wasmtime::component::types::{ComponentInstance, ComponentItem};
use wasmtime::component::{ComponentType, Lift, Linker, LinkerInstance, Lower, Resource, ResourceType};
use wasmtime::{Engine, Result, StoreContextMut};

/// Maximum number of random bytes per call; seeds of hash tables need fewer.
const MAX_RANDOM_BYTES: u64 = 64 << 10;

/// Maximum number of bytes per write.
const WRITE_BYTES: u64 = 64 << 10;

struct InputStream;
struct OutputStream;
struct Pollable;
struct IoError;
/// A resource that a guest never gets.
struct Absent;

const STDOUT: u32 = 1;
const STDERR: u32 = 2;

#[derive(ComponentType, Lift, Lower)]
#[component(variant)]
enum StreamError {
    #[component(name = "last-operation-failed")]
    #[allow(dead_code, reason = "part of the type")]
    LastOperationFailed(Resource<IoError>),
    #[component(name = "closed")]
    Closed,
}

#[derive(ComponentType, Lift, Lower)]
#[component(record)]
struct Datetime {
    seconds: u64,
    nanoseconds: u32,
}

/// Links one WASI interface under the name and with the items that the component imports.
pub(crate) fn define(
    linker: &mut Linker<Guest>,
    engine: &Engine,
    name: &str,
    wanted: &ComponentInstance,
) -> Result<()> {
    let interface = name.split('@').next().unwrap_or(name).to_owned();
    let mut instance = linker.instance(name)?;
    for (item, wanted) in wanted.exports(engine) {
        match wanted.ty {
            ComponentItem::Resource(_) => {
                let dropped = |mut store: StoreContextMut<'_, Guest>, _| {
                    store.data_mut().drop_handle();
                    Ok(())
                };
                instance.resource(item, resource_type(item), dropped)?;
            }
            ComponentItem::ComponentFunc(_) => function(&mut instance, &interface, item)?,
            _ => {}
        }
    }
    Ok(())
}

fn resource_type(name: &str) -> ResourceType {
    match name {
        "input-stream" => ResourceType::host::<InputStream>(),
        "output-stream" => ResourceType::host::<OutputStream>(),
        "pollable" => ResourceType::host::<Pollable>(),
        "error" => ResourceType::host::<IoError>(),
        _ => ResourceType::host::<Absent>(),
    }
}

fn function(on: &mut LinkerInstance<'_, Guest>, interface: &str, name: &str) -> Result<()> {
    match interface {
        "wasi:cli/environment" | "wasi:cli/exit" | "wasi:filesystem/preopens" => surroundings(on, interface, name),
        "wasi:cli/stdin" | "wasi:cli/stdout" | "wasi:cli/stderr" => standard_stream(on, interface, name),
        "wasi:cli/terminal-stdin" | "wasi:cli/terminal-stdout" | "wasi:cli/terminal-stderr" => {
            on.func_wrap(name, |_, (): ()| Ok((None::<Resource<Absent>>,)))
        }
        "wasi:clocks/monotonic-clock" | "wasi:clocks/wall-clock" => clock(on, interface, name),
        "wasi:random/random" | "wasi:random/insecure" | "wasi:random/insecure-seed" => random(on, interface, name),
        "wasi:io/streams" => stream(on, interface, name),
        "wasi:io/poll" => poll(on, interface, name),
        _ => refuse(on, interface, name),
    }
}

fn refuse(on: &mut LinkerInstance<'_, Guest>, interface: &str, name: &str) -> Result<()> {
    let called = format!("called `{interface}#{name}`: plugins have no files, sockets or other input and output");
    on.func_new(name, move |_, _, _, _| Err(HostRefusal(called.clone()).into()))
}

fn surroundings(on: &mut LinkerInstance<'_, Guest>, interface: &str, name: &str) -> Result<()> {
    match name {
        "get-environment" => on.func_wrap(name, |_, (): ()| Ok((Vec::<(String, String)>::new(),))),
        "get-arguments" => on.func_wrap(name, |_, (): ()| Ok((Vec::<String>::new(),))),
        "initial-cwd" => on.func_wrap(name, |_, (): ()| Ok((None::<String>,))),
        "get-directories" => on.func_wrap(name, |_, (): ()| Ok((Vec::<(Resource<Absent>, String)>::new(),))),
        "exit" => on.func_wrap(name, |_, (_,): (std::result::Result<(), ()>,)| -> Result<()> {
            Err(HostRefusal("called exit: a plugin returns, or panics with a message".into()).into())
        }),
        _ => refuse(on, interface, name),
    }
}

fn standard_stream(on: &mut LinkerInstance<'_, Guest>, interface: &str, name: &str) -> Result<()> {
    match name {
        "get-stdin" => on.func_wrap(name, |store, (): ()| new_handle::<InputStream>(store, 0)),
        "get-stdout" => on.func_wrap(name, |store, (): ()| new_handle::<OutputStream>(store, STDOUT)),
        "get-stderr" => on.func_wrap(name, |store, (): ()| new_handle::<OutputStream>(store, STDERR)),
        _ => refuse(on, interface, name),
    }
}

fn new_handle<T: 'static>(mut store: StoreContextMut<'_, Guest>, rep: u32) -> Result<(Resource<T>,)> {
    store.data_mut().add_handle()?;
    Ok((Resource::new_own(rep),))
}

fn clock(on: &mut LinkerInstance<'_, Guest>, interface: &str, name: &str) -> Result<()> {
    match (interface, name) {
        ("wasi:clocks/wall-clock", "now" | "resolution") => {
            on.func_wrap(name, |_, (): ()| Ok((Datetime { seconds: 0, nanoseconds: 0 },)))
        }
        (_, "now" | "resolution") => on.func_wrap(name, |_, (): ()| Ok((0_u64,))),
        (_, "subscribe-instant" | "subscribe-duration") => {
            on.func_wrap(name, |store, (_,): (u64,)| new_handle::<Pollable>(store, 0))
        }
        _ => refuse(on, interface, name),
    }
}

fn random(on: &mut LinkerInstance<'_, Guest>, interface: &str, name: &str) -> Result<()> {
    match name {
        "get-random-bytes" | "get-insecure-random-bytes" => {
            on.func_wrap(name, |mut store: StoreContextMut<'_, Guest>, (length,): (u64,)| {
                if length > MAX_RANDOM_BYTES {
                    return Err(HostRefusal(format!("requested {length} random bytes at once")).into());
                }
                charge(&mut store, length as usize);
                Ok(((0..length).map(|_| next_random(store.data_mut()) as u8).collect::<Vec<u8>>(),))
            })
        }
        "get-random-u64" | "get-insecure-random-u64" => {
            on.func_wrap(name, |mut store: StoreContextMut<'_, Guest>, (): ()| Ok((next_random(store.data_mut()),)))
        }
        "insecure-seed" | "get-insecure-seed" => on.func_wrap(name, |mut store: StoreContextMut<'_, Guest>, (): ()| {
            let guest = store.data_mut();
            Ok(((next_random(guest), next_random(guest)),))
        }),
        _ => refuse(on, interface, name),
    }
}

/// Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators" (SplitMix64).
fn next_random(guest: &mut Guest) -> u64 {
    guest.random = guest.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (guest.random ^ (guest.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

type Streamed<T> = Result<(std::result::Result<T, StreamError>,)>;

fn stream(on: &mut LinkerInstance<'_, Guest>, interface: &str, name: &str) -> Result<()> {
    match name {
        "[method]input-stream.read" | "[method]input-stream.blocking-read" => on
            .func_wrap(name, |_, (_, _): (Resource<InputStream>, u64)| -> Streamed<Vec<u8>> {
                Ok((Err(StreamError::Closed),))
            }),
        "[method]input-stream.subscribe" => {
            on.func_wrap(name, |store, (_,): (Resource<InputStream>,)| new_handle::<Pollable>(store, 0))
        }
        "[method]output-stream.subscribe" => {
            on.func_wrap(name, |store, (_,): (Resource<OutputStream>,)| new_handle::<Pollable>(store, 0))
        }
        "[method]output-stream.check-write" => {
            on.func_wrap(name, |_, (_,): (Resource<OutputStream>,)| -> Streamed<u64> { Ok((Ok(WRITE_BYTES),)) })
        }
        "[method]output-stream.write" | "[method]output-stream.blocking-write-and-flush" => on.func_wrap(
            name,
            |mut store: StoreContextMut<'_, Guest>,
             (stream, bytes): (Resource<OutputStream>, Vec<u8>)|
             -> Streamed<()> {
                charge(&mut store, bytes.len());
                if stream.rep() == STDERR {
                    store.data_mut().write_stderr(&bytes);
                }
                Ok((Ok(()),))
            },
        ),
        "[method]output-stream.flush" | "[method]output-stream.blocking-flush" => {
            on.func_wrap(name, |_, (_,): (Resource<OutputStream>,)| -> Streamed<()> { Ok((Ok(()),)) })
        }
        _ => refuse(on, interface, name),
    }
}

/// Every pollable is ready: a guest that waits for a clock spins until its fuel is used up.
fn poll(on: &mut LinkerInstance<'_, Guest>, interface: &str, name: &str) -> Result<()> {
    match name {
        "[method]pollable.ready" => on.func_wrap(name, |_, (_,): (Resource<Pollable>,)| Ok((true,))),
        "[method]pollable.block" => on.func_wrap(name, |_, (_,): (Resource<Pollable>,)| Ok(())),
        "poll" => {
            on.func_wrap(name, |mut store: StoreContextMut<'_, Guest>, (waiting,): (Vec<Resource<Pollable>>,)| {
                charge(&mut store, waiting.len() * size_of::<u64>());
                Ok(((0..waiting.len() as u32).collect::<Vec<u32>>(),))
            })
        }
        _ => refuse(on, interface, name),
    }
}
