//! Memory of this process, for limits on work that cannot be bounded otherwise.

/// Resident memory of this process in bytes, without memory-mapped files such as weights; 0 if the system does not report it.
///
/// Source: proc_pid_statm(5): the second and third field, in pages.
pub fn private_memory_bytes() -> u64 {
    const PAGE_BYTES: u64 = 4096; // larger on some systems, where the result is too small
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let mut pages = statm.split(' ').skip(1).map_while(|field| field.parse::<u64>().ok());
    let (resident, shared) = (pages.next().unwrap_or_default(), pages.next().unwrap_or_default());
    resident.saturating_sub(shared) * PAGE_BYTES
}
