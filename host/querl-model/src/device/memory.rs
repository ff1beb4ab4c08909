//! What a card's memory is used for.

use super::gpu::Gpu;
use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::{Error, Result, bail};

/// Bytes of a card's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CardMemory {
    /// Most that this process's tensors took at once since [`Gpu::forget_peak`].
    pub peak: u64,
    /// What is kept for its tensors, used or not.
    pub held: u64,
    /// What nobody uses.
    pub free: u64,
    /// All of it.
    pub total: u64,
}

impl CardMemory {
    /// What is used beside the tensors of this process: by its context, cuBLAS and kernels, and by other processes.
    pub fn beside(&self) -> u64 {
        self.total.saturating_sub(self.free).saturating_sub(self.held)
    }
}

impl Gpu {
    /// What is used now, once everything that was asked of the card is done.
    ///
    /// # Errors
    /// The driver does not tell.
    pub fn memory(&self) -> Result<CardMemory> {
        self.synchronize()?;
        let (free, total) = self.stream().context().mem_get_info().map_err(Error::wrap)?;
        let peak = self.of_pool(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?;
        let held = self.of_pool(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        Ok(CardMemory { peak, held, free: free as u64, total: total as u64 })
    }

    /// Lets [`CardMemory::peak`] begin at what is used now.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn forget_peak(&self) -> Result<()> {
        let mut value = 0u64;
        let (pool, which) = (self.pool()?, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH);
        // SAFETY: the pool is the card's own, and the attribute is a 64-bit number that may be set to 0.
        unsafe { sys::cuMemPoolSetAttribute(pool, which, (&raw mut value).cast()) }.result().map_err(Error::wrap)
    }

    fn of_pool(&self, which: sys::CUmemPool_attribute) -> Result<u64> {
        let mut value = 0u64;
        // SAFETY: the pool is the card's own, and both attributes that are asked for are 64-bit numbers.
        unsafe { sys::cuMemPoolGetAttribute(self.pool()?, which, (&raw mut value).cast()) }
            .result()
            .map_err(Error::wrap)?;
        Ok(value)
    }

    fn pool(&self) -> Result<sys::CUmemoryPool> {
        let context = self.stream().context();
        if !context.has_async_alloc() {
            bail!("this card's driver has no memory pools, so that the memory of tensors is not known");
        }
        context.bind_to_thread().map_err(Error::wrap)?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: it writes one pointer, to a live local.
        unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, context.cu_device()) }.result().map_err(Error::wrap)?;
        Ok(pool)
    }
}
