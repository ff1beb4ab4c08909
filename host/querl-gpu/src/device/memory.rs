//! Memory in use.

use super::gpu::Gpu;
use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::{Error, Result, bail};
use querl_model::DeviceMemory;

impl Gpu {
    /// Memory that is used, after waiting for submitted work.
    ///
    /// # Errors
    /// The driver does not report it.
    pub fn memory(&self) -> Result<DeviceMemory> {
        self.synchronize()?;
        let (free, total) = self.stream().context().mem_get_info().map_err(Error::wrap)?;
        let peak = self.pool_attribute(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?;
        let reserved = self.pool_attribute(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        Ok(DeviceMemory { peak, reserved, free: free as u64, total: total as u64 })
    }

    /// Lets [`DeviceMemory::peak`] begin at what is used now.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn reset_peak_memory(&self) -> Result<()> {
        let mut value = 0u64;
        let (pool, which) = (self.pool()?, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH);
        // SAFETY: the pool is the GPU's own, and the attribute is a 64-bit number that may be set to 0.
        unsafe { sys::cuMemPoolSetAttribute(pool, which, (&raw mut value).cast()) }.result().map_err(Error::wrap)
    }

    fn pool_attribute(&self, which: sys::CUmemPool_attribute) -> Result<u64> {
        let mut value = 0u64;
        // SAFETY: the pool is the GPU's own, and both attributes that are asked for are 64-bit numbers.
        unsafe { sys::cuMemPoolGetAttribute(self.pool()?, which, (&raw mut value).cast()) }
            .result()
            .map_err(Error::wrap)?;
        Ok(value)
    }

    fn pool(&self) -> Result<sys::CUmemoryPool> {
        let context = self.stream().context();
        if !context.has_async_alloc() {
            bail!("this GPU's driver has no memory pools, so the memory of tensors is not known");
        }
        context.bind_to_thread().map_err(Error::wrap)?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: it writes one pointer, to a live local.
        unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, context.cu_device()) }.result().map_err(Error::wrap)?;
        Ok(pool)
    }
}
