//! Keys and values of what a sequence holds so far.

/// One sequence's cache. Cloning one continues the same prefix in two ways.
#[derive(Debug, Clone)]
pub struct KvCache {
    pub(crate) layers: Vec<LayerCache>,
    pub(crate) len: usize,
}

/// Keys and values of one layer, `(len, kv_heads * D)` each.
#[derive(Debug, Clone, Default)]
pub(crate) struct LayerCache {
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
}

impl KvCache {
    /// An empty cache for a decoder of `n_layers`.
    pub fn new(n_layers: usize) -> Self {
        Self { layers: vec![LayerCache::default(); n_layers], len: 0 }
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True before the first token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
