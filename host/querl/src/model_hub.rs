//! Models from the Hugging Face Hub: a name `ORG/NAME` or `ORG/NAME@REVISION` can be given wherever the folder of a model is expected.
//!
//! A model is downloaded once, to the cache of huggingface_hub: `HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`.
//! `HF_ENDPOINT` is the URL of another hub, `HF_TOKEN` or the file `HF_HOME/token` the token for private models. With `HF_HUB_OFFLINE=1`
//! only the cache is used. A complete snapshot in the cache is used without a request to the hub.

use crate::args::usage;
use hf_hub::api::sync::{ApiBuilder, ApiError};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use querl_core::config::parse_model_name;
use querl_core::fsx::io_problem;
use sha2::{Digest, Sha256};
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Maximum number of retries per file. A retry continues the partial download.
const RETRIES: usize = 3;

/// The folder of a model that is given as a path or as a name on the hub; the latter is downloaded. An argument whose parent folder exists
/// is a path.
pub fn folder(path: &Path) -> anyhow::Result<PathBuf> {
    let is_path = path.exists() || path.parent().is_some_and(Path::exists);
    match path.to_str().filter(|name| !is_path && parse_model_name(name).is_some()) {
        Some(name) => download(name),
        None => Ok(path.to_owned()),
    }
}

/// Like [`folder`], for an argument that may be missing.
pub fn optional_folder(path: Option<&Path>) -> anyhow::Result<Option<PathBuf>> {
    path.map(folder).transpose()
}

/// The folder of the model with this name on the hub, downloaded unless the cache has a complete copy.
pub fn download(name: &str) -> anyhow::Result<PathBuf> {
    let found = find(name);
    let unusable = |reason| usage(format!("{name}: no such folder, and {reason}"));
    Ok(found.map_err(unusable)?.expect("`find` downloads what it does not find"))
}

/// A [`querl_core::config::ModelHub`] that downloads models.
pub fn find(name: &str) -> Result<Option<PathBuf>, String> {
    let (cache, repo) = (cache()?, repo(name)?);
    if let Some(folder) = complete_snapshot(&cache.repo(repo.clone())) {
        return Ok(Some(folder));
    }
    if env::var_os("HF_HUB_OFFLINE").is_some_and(|value| value != "0" && !value.is_empty()) {
        return Err(format!("{} has no complete copy, and HF_HUB_OFFLINE is set", cache.path().display()));
    }
    // A partial download is kept on an interrupt, and the next attempt continues it.
    fetch(cache, repo).map(Some)
}

/// A [`querl_core::config::ModelHub`] that only searches the cache, for commands that do not open the model.
pub fn find_cached(name: &str) -> Result<Option<PathBuf>, String> {
    Ok(complete_snapshot(&cache()?.repo(repo(name)?)))
}

fn repo(name: &str) -> Result<Repo, String> {
    let (id, revision) = parse_model_name(name).ok_or("its form is not ORG/NAME or ORG/NAME@REVISION")?;
    Ok(Repo::with_revision(id.to_owned(), RepoType::Model, revision.to_owned()))
}

fn cache() -> Result<Cache, String> {
    if let Some(folder) = env::var_os("HF_HUB_CACHE") {
        return Ok(Cache::new(folder.into()));
    }
    if env::var_os("HF_HOME").is_none() && env::home_dir().is_none() {
        return Err("no folder for downloaded models is known; set HF_HOME".into());
    }
    Ok(Cache::from_env())
}

/// The snapshot folder, if all weight files exist. Weights are downloaded last, so that the other files exist then, too.
fn complete_snapshot(repo: &CacheRepo) -> Option<PathBuf> {
    let config = repo.get("config.json").or_else(|| repo.get("adapter_config.json"))?;
    let folder = config.parent()?.to_owned();
    let has_weights = match fs::read(folder.join("model.safetensors.index.json")) {
        Ok(index) => {
            let index: serde_json::Value = serde_json::from_slice(&index).ok()?;
            let mut files = index.get("weight_map")?.as_object()?.values().filter_map(|file| file.as_str());
            files.all(|file| folder.join(file).exists())
        }
        Err(_) => ["model.safetensors", "adapter_model.safetensors"].iter().any(|file| folder.join(file).exists()),
    };
    has_weights.then_some(folder)
}

fn fetch(cache: Cache, repo: Repo) -> Result<PathBuf, String> {
    let endpoint = env::var("HF_ENDPOINT").unwrap_or_else(|_| "https://huggingface.co".into());
    let endpoint = endpoint.trim_end_matches('/');
    let token = env::var("HF_TOKEN").ok().filter(|token| !token.is_empty()).or_else(|| cache.token());
    let id = repo.url();
    let failed = |what: &str, error: &ApiError| format!("{endpoint}/{id}: {what}: {}", explain(error));
    let api = ApiBuilder::from_cache(cache.clone()).with_endpoint(endpoint.to_owned()).with_token(token);
    let api = api.with_retries(RETRIES).build().map_err(|error| failed("no connection", &error))?;
    let info = api.repo(repo.clone()).info().map_err(|error| failed("cannot be downloaded", &error))?;
    // All files are of one commit, even if the branch is updated during the download.
    let pinned = Repo::with_revision(id.clone(), RepoType::Model, info.sha.clone());
    let mut files: Vec<String> =
        info.siblings.into_iter().map(|file| file.rfilename).filter(|file| is_read(file)).collect();
    files.sort_by_key(|file| (file.ends_with(".safetensors"), file.clone()));
    if !files.last().is_some_and(|file| file.ends_with(".safetensors")) {
        return Err(format!("{endpoint}/{id} has no weights as safetensors; name a model that has, or convert it"));
    }
    let (remote, local) = (api.repo(pinned.clone()), cache.repo(pinned));
    for file in &files {
        if local.get(file).is_none() {
            let path = remote.get(file).map_err(|error| failed(file, &error))?;
            verify(&path).map_err(|error| format!("{endpoint}/{id}: {file}: {error}"))?;
        }
    }
    let unwritable =
        |error: io::Error| format!("{}: cannot be written: {}", cache.path().display(), io_problem(&error));
    cache.repo(repo.clone()).create_ref(&info.sha).map_err(unwritable)?;
    let incomplete =
        || format!("{endpoint}/{id} lacks config.json, adapter_config.json or a file of weights that its index names");
    complete_snapshot(&cache.repo(repo)).ok_or_else(incomplete)
}

/// True for files that querl reads: configuration, tokenizer and safetensors; false for weights in other formats.
fn is_read(file: &str) -> bool {
    let ending = Path::new(file).extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let weights = file.starts_with("model") || file.starts_with("adapter_model");
    match ending {
        _ if file.contains(['/', '\\']) => file == "1_Pooling/config.json",
        "safetensors" => weights,
        "json" | "jinja" | "txt" => true,
        _ => false,
    }
}

/// Compares a downloaded file with its SHA-256, which is the file name of a large file in the cache. A damaged file is removed.
fn verify(pointer: &Path) -> Result<(), String> {
    let blob = pointer.canonicalize().map_err(|error| error.to_string())?;
    let digest = blob.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if digest.len() != 64 || !digest.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(());
    }
    let mut hasher = Sha256::new();
    let read = fs::File::open(&blob).and_then(|mut file| io::copy(&mut file, &mut hasher));
    read.map_err(|error| error.to_string())?;
    if hex::encode(hasher.finalize()).eq_ignore_ascii_case(digest) {
        return Ok(());
    }
    let removed = fs::remove_file(pointer).and_then(|()| fs::remove_file(&blob));
    removed.map_err(|error| format!("damaged download, which cannot be removed: {error}"))?;
    Err(format!("the download does not have the SHA-256 {digest}; it was removed, run the same command again"))
}

fn explain(error: &ApiError) -> String {
    let request = match error {
        ApiError::RequestError(request) => request,
        ApiError::IoError(error) => return io_problem(error),
        ApiError::TooManyRetries(error) => return format!("too many retries: {}", explain(error)),
        error => return error.to_string(),
    };
    match request.to_string() {
        text if text.contains("401") || text.contains("403") => {
            format!("{text}; no such model, or one that needs a token with access to it: set HF_TOKEN")
        }
        text if text.contains("404") => format!("{text}; no such model or revision"),
        text => format!("{text}; HF_ENDPOINT names another hub"),
    }
}
