//! The allocator of components.
//!
//! An instance runs one call, and its complete memory is then returned to the host. The allocator is therefore optimised for fast
//! allocation: the host requests one block per text that it passes, a few dozen per episode. Freed blocks are kept in one free list per
//! size class and reused for that size class, which limits the memory of a call over a complete dataset. Blocks are never split or
//! merged. The memory in use is at most the sum, over all size classes, of the maximum number of blocks of the class that were alive at
//! the same time.
//!
//! `wasi-libc` uses its own allocator for its few blocks. Both get memory by `memory.grow`, and neither uses memory of the other.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::ptr::{NonNull, null_mut};

/// Alignment and granularity of blocks in bytes: start and size are multiples of it, so that a free block has space for its link.
const GRAIN: usize = 8;
/// Up to this size in bytes, each multiple of `GRAIN` is a size class.
const SMALL_BYTES: usize = 1024;
const N_SMALL: usize = SMALL_BYTES / GRAIN;
/// Above `SMALL_BYTES`, each power of two is divided into this many size classes: at most an eighth of a block is unused.
const STEPS: usize = 8;
const N_SIZES: usize = N_SMALL + STEPS * (usize::BITS - SMALL_BYTES.ilog2()) as usize;

const PAGE_BYTES: usize = 64 << 10;
/// Size of the first memory region, a static of the component, so that a call with a usual batch needs no `memory.grow`. It is zero and so
/// not stored in the component file, and pages that are not touched cost nothing.
const FIRST_BYTES: usize = 512 << 10;
/// Maximum memory requested in advance, which bounds the waste near the memory limit.
const MAX_SPARE_BYTES: usize = 1 << 20;

#[repr(align(8))]
struct First(#[allow(dead_code, reason = "only its address is used")] std::cell::UnsafeCell<[u8; FIRST_BYTES]>);

// SAFETY: a component has one thread.
unsafe impl Sync for First {}

static FIRST: First = First(std::cell::UnsafeCell::new([0; FIRST_BYTES]));

/// Head of a free list. A free block contains the address of the next free block of its size class.
type Free = Cell<Option<NonNull<Link>>>;
struct Link(Free);

struct Arena {
    /// Address at which the next new block starts; 0 before the first.
    next: Cell<usize>,
    /// End address of the current memory region.
    end: Cell<usize>,
    free: [Free; N_SIZES],
}

// SAFETY: a component has one thread.
unsafe impl Sync for Arena {}

#[global_allocator]
static ARENA: Arena = Arena { next: Cell::new(0), end: Cell::new(0), free: [const { Cell::new(None) }; N_SIZES] };

/// The index of the size class for `bytes`, and the block size of that class in bytes. `bytes` is above 0.
#[inline]
fn size_of_block(bytes: usize) -> (usize, usize) {
    if bytes <= SMALL_BYTES {
        let n_grains = bytes.div_ceil(GRAIN);
        return (n_grains - 1, n_grains * GRAIN);
    }
    let last = bytes - 1;
    let doubling = last.ilog2();
    let step_bits = doubling - STEPS.ilog2();
    let step = (last >> step_bits) % STEPS;
    let place = N_SMALL + (doubling - SMALL_BYTES.ilog2()) as usize * STEPS + step;
    (place, (last | ((1 << step_bits) - 1)).wrapping_add(1))
}

impl Arena {
    #[inline]
    fn take(&self, bytes: usize, align: usize) -> *mut u8 {
        let (place, bytes) = size_of_block(bytes.max(1));
        let list = &self.free[place];
        if let Some(block) = list.get().filter(|block| block.as_ptr() as usize & (align - 1) == 0) {
            // SAFETY: a block in a list is free, at least as large as a link, and `give_back` wrote its link.
            list.set(unsafe { block.as_ref() }.0.get());
            return block.as_ptr().cast();
        }
        self.new_block(bytes, align.max(GRAIN))
    }

    #[inline]
    fn new_block(&self, bytes: usize, align: usize) -> *mut u8 {
        let start = (self.next.get() + align - 1) & !(align - 1);
        match start.checked_add(bytes) {
            Some(end) if end <= self.end.get() => {
                self.next.set(end);
                start as *mut u8
            }
            _ if self.make_room(bytes, align) => self.new_block(bytes, align),
            _ => null_mut(),
        }
    }

    /// Gets a memory region for a new block; false if the host refuses to grow the memory.
    #[cold]
    fn make_room(&self, bytes: usize, align: usize) -> bool {
        if self.end.get() == 0 {
            let start = FIRST.0.get() as usize;
            self.next.set(start);
            self.end.set(start + FIRST_BYTES);
            return true;
        }
        let held = core::arch::wasm32::memory_size(0) * PAGE_BYTES;
        let Some(needed) = bytes.checked_add(align) else { return false };
        let Some(wanted) = needed.checked_add((held / 4).min(MAX_SPARE_BYTES)) else { return false };
        let n_pages = wanted.div_ceil(PAGE_BYTES);
        let page = core::arch::wasm32::memory_grow(0, n_pages);
        if page == usize::MAX {
            return false;
        }
        let start = page * PAGE_BYTES;
        if start != self.end.get() {
            self.next.set(start);
        }
        // The end of the last page of 4 GiB is 2^32, which `usize` cannot represent: one grain less.
        self.end.set(start.checked_add(n_pages * PAGE_BYTES).unwrap_or(usize::MAX - GRAIN + 1));
        true
    }

    #[inline]
    fn give_back(&self, block: *mut u8, bytes: usize) {
        let (place, _) = size_of_block(bytes.max(1));
        let Some(block) = NonNull::new(block.cast::<Link>()) else { return };
        // SAFETY: the caller no longer uses the block; it starts at a multiple of `GRAIN` and has at least that size.
        unsafe { block.write(Link(Cell::new(self.free[place].get()))) };
        self.free[place].set(Some(block));
    }

    fn resize(&self, block: *mut u8, old: usize, new: usize, align: usize) -> *mut u8 {
        let ((old_place, old_bytes), (new_place, new_bytes)) = (size_of_block(old.max(1)), size_of_block(new.max(1)));
        if old_place == new_place {
            return block;
        }
        let start = block as usize;
        let is_last = start + old_bytes == self.next.get();
        if is_last && start.checked_add(new_bytes).is_some_and(|end| end <= self.end.get()) {
            self.next.set(start + new_bytes);
            return block;
        }
        let moved = self.take(new, align);
        if !moved.is_null() {
            // SAFETY: both blocks are at least as long as the shorter of the two sizes, and they are different blocks.
            unsafe { std::ptr::copy_nonoverlapping(block, moved, old.min(new)) };
            self.give_back(block, old);
        }
        moved
    }
}

// SAFETY: a block is either in use or in a free list, and no two blocks overlap: a new block starts where the last one ended, and a block
// of a free list has the size of its class.
unsafe impl GlobalAlloc for Arena {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.take(layout.size(), layout.align())
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        self.give_back(block, layout.size());
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        self.resize(block, layout.size(), new_size, layout.align())
    }
}

unsafe extern "C" {
    /// Defined by [`export!`](crate::export).
    #[link_name = "this plugin registers nothing; write querl_sdk::export!(reward: MyReward), or what kind it is, once in src/lib.rs"]
    safe fn registered();
}

/// Refers to the symbol in every component: the linker keeps this module, because every component has `cabi_realloc` below.
#[used]
static REGISTERED: extern "C" fn() = registered;

/// The allocation function that the host calls for each text and list that it passes. Replaces that of `wasi-libc`, which would use its own
/// allocator for these blocks.
///
/// # Safety
/// Only for calls by the host under the canonical ABI.
#[unsafe(export_name = "cabi_realloc")]
unsafe extern "C" fn cabi_realloc(block: *mut u8, old: usize, align: usize, new: usize) -> *mut u8 {
    let block = match (old, new) {
        (_, 0) => return align as *mut u8,
        (0, _) => ARENA.take(new, align),
        _ => ARENA.resize(block, old, new, align),
    };
    if block.is_null() {
        core::arch::wasm32::unreachable();
    }
    block
}
