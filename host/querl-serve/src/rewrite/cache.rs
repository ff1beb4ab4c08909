//! The cache of recent rewrites.

use lru::LruCache;
use querl_core::fsx::digest_hex;
use querl_core::records::Context;
use querl_core::serving::{Generation, Tenant};
use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

/// A generated text, with the version of the model that it is from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CachedRewrite {
    pub(super) text: String,
    /// Version of the tenant's model.
    pub(super) version: String,
    pub(super) is_truncated: bool,
    pub(super) n_prompt_tokens: usize,
    pub(super) n_tokens: usize,
}

impl CachedRewrite {
    /// The original query in place of a rewrite.
    pub(super) fn raw(query: &str, version: &str) -> Self {
        Self { text: query.into(), version: version.into(), is_truncated: false, n_prompt_tokens: 0, n_tokens: 0 }
    }
}

impl From<Generation> for CachedRewrite {
    fn from(generation: Generation) -> Self {
        let Generation { text, version, truncated: is_truncated, n_prompt_tokens, n_tokens, .. } = generation;
        Self { text, version, is_truncated, n_prompt_tokens, n_tokens }
    }
}

/// Cache of recent rewrites; the least recently used one is evicted first. A version always gives the same rewrites, so its
/// number is a component of the key and no entry of an older version is found. Keys are digests, so that an entry's size does not
/// depend on its query.
pub(super) struct RewriteCache(Option<Mutex<LruCache<String, CachedRewrite>>>);

impl RewriteCache {
    /// A cache of at most `max_entries` rewrites; 0 disables it.
    pub(super) fn new(max_entries: usize) -> Self {
        Self(NonZeroUsize::new(max_entries).map(|max_entries| Mutex::new(LruCache::new(max_entries))))
    }

    pub(super) fn key(tenant: &Tenant, query: &str, context: &Context) -> String {
        let key = (&tenant.name, &tenant.version, query, context);
        digest_hex(&serde_json::to_vec(&key).expect("texts have a JSON form"))
    }

    pub(super) fn get(&self, key: &str) -> Option<CachedRewrite> {
        let cache = self.0.as_ref()?;
        cache.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Stores a rewrite, unless it is from another version than `version`, which is part of the key: the tenant was replaced in
    /// the meantime.
    pub(super) fn put(&self, key: String, version: &str, rewrite: &CachedRewrite) {
        if let Some(cache) = self.0.as_ref().filter(|_| rewrite.version == version) {
            cache.lock().unwrap_or_else(PoisonError::into_inner).put(key, rewrite.clone());
        }
    }
}
