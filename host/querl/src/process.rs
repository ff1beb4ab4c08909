//! Signals and limits of the operating system: memory, stack, CPU time, interrupts. A process that reaches a limit (`ulimit`) ends with an
//! error message and an exit code, and is not killed by a signal.

use crate::terminal;
use mimalloc::MiMalloc;
use querl_pipeline::failure::Ending;
use querl_pipeline::interrupt::{self, InterruptKind};
use std::alloc::{GlobalAlloc, Layout};
use std::ffi::c_int;
use std::process::ExitCode;
#[cfg(unix)]
use std::sync::atomic::{AtomicBool, Ordering};

/// The global allocator: mimalloc. If an allocation fails (`ulimit -v`), the process ends with an error message and exit code 1, not by
/// SIGABRT.
pub struct Allocator;

// SAFETY: all calls are forwarded to mimalloc, except that a null pointer ends the process.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the rules of the trait.
        allocated(unsafe { MiMalloc.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the rules of the trait.
        allocated(unsafe { MiMalloc.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller keeps the rules of the trait.
        allocated(unsafe { MiMalloc.realloc(memory, layout, size) })
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the rules of the trait.
        unsafe { MiMalloc.dealloc(memory, layout) }
    }
}

fn allocated(memory: *mut u8) -> *mut u8 {
    if memory.is_null() {
        end_with(NO_MEMORY);
    }
    memory
}

const NO_MEMORY: &str = "error: out of memory; free some, or raise the limit of address space (`ulimit -v`); finished stages and checkpoints \
                         are kept, run the same command again\n";
const NO_THREAD: &str = "error: no thread can be started; end other processes, or raise the limits of processes and address space (`ulimit -u`, \
                         `ulimit -v`); finished stages and checkpoints are kept, run the same command again\n";

/// Ends the process with a message, without allocating memory.
#[cold]
fn end_with(sentence: &'static str) -> ! {
    #[cfg(unix)]
    // SAFETY: both are async-signal-safe, and the bytes are static.
    unsafe {
        libc::write(libc::STDERR_FILENO, sentence.as_ptr().cast(), sentence.len());
        libc::_exit(Ending::Failed as c_int)
    }
    #[cfg(not(unix))]
    {
        terminal::print_error(sentence.trim_end());
        std::process::exit(Ending::Failed as c_int)
    }
}

/// Installs a panic hook that ends the process if a library cannot start a thread. Such a library panics, and other threads might wait
/// for the missing thread forever.
pub fn end_where_no_thread_starts() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload_as_str().is_some_and(is_of_no_thread) { end_with(NO_THREAD) } else { default(panic) }
    }));
}

/// True for the panic messages of the standard library, tokio and rayon if a thread could not be started.
fn is_of_no_thread(message: &str) -> bool {
    let is_of_thread = ["spawn", "thread pool"].iter().any(|words| message.contains(words));
    is_of_thread && message.contains("Resource temporarily unavailable")
}

/// Number of the option `mi_option_purge_delay` in mimalloc's header: milliseconds until freed memory is returned to the system, -1 for
/// never.
const PURGE_DELAY: c_int = 15;

/// Makes the allocator keep freed memory. A training step of a large model frees a gigabyte and allocates it again; the system clears
/// returned pages before they are reused, which takes a fifth of the CPU time. The environment variable `MIMALLOC_PURGE_DELAY` has
/// precedence.
pub fn keep_freed_memory() {
    if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
        // SAFETY: it sets a number that the allocator reads; any number is allowed.
        unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
    }
}

/// Stack size of the main thread on usual systems.
const STACK_BYTES: usize = 8 << 20;

/// Runs `program` on a thread whose stack `ulimit -s` does not limit.
pub fn on_a_stack(program: impl FnOnce() -> ExitCode + Send + 'static) -> ExitCode {
    // The name appears in panic messages.
    let thread = std::thread::Builder::new().name("main".into()).stack_size(STACK_BYTES).spawn(program);
    match thread.map(std::thread::JoinHandle::join) {
        Ok(Ok(code)) => code,
        // The exit code of a panic in a main thread.
        Ok(Err(_)) => ExitCode::from(101),
        Err(error) => {
            let limits = "free memory, or raise the limits of address space and processes (`ulimit -v`, `ulimit -u`)";
            terminal::print_error(&format!("error: no thread to run on: {error}; {limits}"));
            ExitCode::from(Ending::Failed as u8)
        }
    }
}

static IS_RESUMABLE: AtomicBool = AtomicBool::new(false);

/// From now on, the message of an interrupt says that finished stages and checkpoints are kept.
pub fn set_resumable() {
    IS_RESUMABLE.store(true, Ordering::SeqCst);
}

fn report(kind: InterruptKind) {
    #[cfg(unix)]
    let (is_out_of_time, why) =
        (OUT_OF_CPU_TIME.load(Ordering::SeqCst), "the limit of CPU time (`ulimit -t`) is reached");
    #[cfg(not(unix))]
    let (is_out_of_time, why) = (false, "");
    match kind {
        InterruptKind::AtSafePoint if is_out_of_time => {
            terminal::print(&format!("{why}: stopping at the next safe point"))
        }
        // No message: the server prints how long it waits for requests in progress.
        InterruptKind::AtSafePoint if terminal::is_server() => {}
        InterruptKind::AtSafePoint => {
            terminal::print("stopping at the next safe point; interrupt again to stop at once");
        }
        InterruptKind::AtOnce if terminal::is_server() => {
            terminal::print_error("error: interrupted; requests in progress are not answered");
        }
        InterruptKind::AtOnce => {
            let why = if is_out_of_time { why } else { "interrupted" };
            let kept = match IS_RESUMABLE.load(Ordering::SeqCst) {
                true => "; finished stages and checkpoints are kept, run the same command again",
                false => "",
            };
            terminal::print_error(&format!("error: {why}{kept}"));
        }
    }
}

/// Installs the signal handlers. SIGHUP stays ignored if the parent process ignores it (`nohup`). SIGXFSZ is ignored, so that a write
/// beyond the limit of `ulimit -f` fails with an error that names the file. SIGXCPU is handled as an interrupt.
pub fn install_signals() -> anyhow::Result<()> {
    #[cfg(unix)]
    // SAFETY: reads and sets signal dispositions and the signal mask before other threads exist; no handler runs. SIGHUP is blocked until
    // its handler is set, so that one that arrives before is handled, or ignored, like any other.
    let (mask, is_hangup_ignored) = unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        let (mut hangup, mut mask) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&mut hangup);
        libc::sigaddset(&mut hangup, libc::SIGHUP);
        libc::pthread_sigmask(libc::SIG_BLOCK, &hangup, &mut mask);
        (mask, libc::signal(libc::SIGHUP, libc::SIG_DFL) == libc::SIG_IGN)
    };
    interrupt::install(report)?;
    #[cfg(unix)]
    {
        let handler = if is_hangup_ignored { libc::SIG_IGN } else { hang_up as *const () as libc::sighandler_t };
        // SAFETY: as above. This replaces the interrupt handler for SIGHUP.
        unsafe {
            libc::signal(libc::SIGXCPU, end_of_cpu_time as *const () as libc::sighandler_t);
            libc::signal(libc::SIGHUP, handler);
            libc::pthread_sigmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut());
        }
        leave_cpu_time_to_save();
    }
    Ok(())
}

/// Handler of SIGHUP. A server without a terminal reloads. Otherwise the first SIGHUP is handled as SIGTERM and others are ignored, because
/// a closed terminal sends several: from the kernel and from the shell.
#[cfg(unix)]
extern "C" fn hang_up(_: c_int) {
    static IS_CLOSED: AtomicBool = AtomicBool::new(false);
    if !interrupt::note_reload() && !IS_CLOSED.swap(true, Ordering::SeqCst) {
        // SAFETY: it is async-signal-safe.
        unsafe { libc::raise(libc::SIGTERM) };
    }
}

#[cfg(unix)]
static OUT_OF_CPU_TIME: AtomicBool = AtomicBool::new(false);

/// Handler of SIGXCPU. The first one is handled as SIGTERM and others are ignored, because the kernel sends SIGXCPU each second until the
/// hard limit, where it sends SIGKILL.
#[cfg(unix)]
extern "C" fn end_of_cpu_time(_: c_int) {
    if !OUT_OF_CPU_TIME.swap(true, Ordering::SeqCst) {
        // SAFETY: it is async-signal-safe.
        unsafe { libc::raise(libc::SIGTERM) };
    }
}

/// Lowers the soft limit of CPU time, which sends SIGXCPU, below the hard limit, which kills the process: by a tenth, at least 1 and at
/// most 10 seconds. `ulimit -t` sets both limits to the same value, which leaves no time to save.
#[cfg(unix)]
fn leave_cpu_time_to_save() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Cpu);
    let Some(hard) = maximum else { return };
    let soft = hard.saturating_sub((hard / 10).clamp(1, 10)).max(1);
    if current.is_none_or(|current| current > soft) {
        // Always allowed for a lower limit. If it failed, the process would be killed at the hard limit.
        let _ = setrlimit(Resource::Cpu, Rlimit { current: Some(soft), maximum });
    }
}

#[cfg(test)]
mod tests {
    use super::{PURGE_DELAY, is_of_no_thread};

    /// Regression: with little address space, `model logprobs` ended with a panic of rayon's thread pool.
    #[test]
    fn a_thread_that_is_refused_is_known_by_the_message_of_the_panic() {
        let refused = "ThreadPoolBuildError { kind: IOError(Os { code: 11, kind: WouldBlock, message: \"Resource temporarily unavailable\" }) }";
        assert!(is_of_no_thread(&format!("The global thread pool has not been initialized.: {refused}")));
        assert!(is_of_no_thread("failed to spawn thread: Resource temporarily unavailable (os error 11)"));
        assert!(!is_of_no_thread("index out of bounds") && !is_of_no_thread("spawn: no such file"));
    }

    #[test]
    fn purge_delay_is_the_option_of_that_number() {
        // SAFETY: it reads a number.
        let default = unsafe { libmimalloc_sys::mi_option_get(PURGE_DELAY) };
        let expected = std::env::var("MIMALLOC_PURGE_DELAY").map_or(1000, |text| text.parse().unwrap_or(1000));
        assert_eq!(default, expected, "the options of mimalloc have other numbers");
    }
}
