//! Memory of a card that other cards read and write.

use super::gpu::Gpu;
use candle_core::cuda_backend::cudarc::driver::{result, sys};
use candle_core::{Error, Result};
use std::ffi::{c_int, c_uint};

/// `CUmemAccessDesc`, of which cudarc has one form for each CUDA: who, and what for.
#[repr(C)]
struct Access {
    /// 1: a device.
    kind: c_uint,
    ordinal: c_int,
    /// 3: to read and to write.
    flags: c_uint,
}

impl Gpu {
    /// Which card this is, from 0.
    pub(crate) fn ordinal(&self) -> usize {
        self.stream().context().ordinal()
    }

    /// Opens this card's memory to those of `cards` that can reach it. NCCL's cards write each other's values where they are; they
    /// reach what was allocated alone, but not the pool from which all our memory comes: a pool is its own card's until it is opened
    /// (CUDA C++ Programming Guide, "Device Accessibility for Multi-GPU Support").
    pub(crate) fn open_to(&self, cards: impl Iterator<Item = usize>) -> Result<()> {
        let context = self.stream().context();
        if !context.has_async_alloc() {
            return Ok(());
        }
        context.bind_to_thread().map_err(Error::wrap)?;
        for card in cards.filter(|card| *card != self.ordinal()) {
            self.open_to_one(card as c_int).map_err(Error::wrap)?;
        }
        Ok(())
    }

    fn open_to_one(&self, card: c_int) -> std::result::Result<(), result::DriverError> {
        let (own, other) = (self.stream().context().cu_device(), result::device::get(card)?);
        let (mut can_reach, mut pool) = (0, std::ptr::null_mut());
        let access = Access { kind: 1, ordinal: card, flags: 3 };
        // SAFETY: the first two calls write a local value of their types; the third reads one description, which has the layout of
        // the driver's, and a pool that the driver has given.
        unsafe {
            sys::cuDeviceCanAccessPeer(&raw mut can_reach, other, own).result()?;
            if can_reach == 0 {
                return Ok(());
            }
            sys::cuDeviceGetDefaultMemPool(&raw mut pool, own).result()?;
            sys::cuMemPoolSetAccess(pool, (&raw const access).cast(), 1).result()
        }
    }
}
