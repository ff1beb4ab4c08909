//! Packs a plugin's folder and its component into a bundle.

use crate::archive::{self, ArchiveLimits, is_golden, names};
use crate::bundle::{Bundle, check_component, sums};
use crate::error::BundleError;
use crate::file;
use crate::manifest::{BUNDLE_FORMAT, BuildSection, BundleSection, Language, Manifest};
use std::collections::BTreeMap;
use std::path::Path;

/// The bundle of the plugin in `folder` with the component that was built from it; the same bytes from the same content.
///
/// Of the folder it takes `plugin.toml`, `README.md`, `LICENSE` and `*.jsonl` in the folder of golden cases. The archive is
/// called [`Manifest::file_name`].
///
/// # Errors
/// A file is missing, not a plain file, or too large; the manifest is wrong; the component is none.
pub fn pack(folder: &Path, component: &[u8]) -> Result<Vec<u8>, BundleError> {
    check_component(component).map_err(|message| BundleError::folder(folder, format!("its component {message}")))?;
    let manifest = Manifest::read(folder)?;
    if manifest.bundle.is_some() {
        let message = "has a section [bundle], which packing adds; take it out";
        return Err(BundleError::folder(&folder.join(names::MANIFEST), message));
    }
    let mut files = golden(folder, &manifest)?;
    files.insert(names::README.to_owned(), text(folder, names::README, "what the plugin does, for those who use it")?);
    files.insert(names::LICENSE.to_owned(), text(folder, names::LICENSE, "the licence's text")?);
    files.insert(names::MANIFEST.to_owned(), completed(manifest, folder, component).to_text().into_bytes());
    files.insert(names::COMPONENT.to_owned(), component.to_vec());
    files.insert(names::SUMS.to_owned(), sums(&files).into_bytes());
    let bytes = archive::write(&files).map_err(|source| BundleError::io(folder, source))?;
    // Whatever the reader would refuse is found here, by the author, and not by those who receive the file.
    Bundle::from_bytes(&bytes, &folder.display().to_string())?;
    Ok(bytes)
}

fn completed(manifest: Manifest, folder: &Path, component: &[u8]) -> Manifest {
    let found = || Language::of_folder(folder).map(|language| BuildSection { language });
    let mut completed = manifest;
    completed.build = completed.build.or_else(found);
    completed.plugin.golden = names::GOLDEN.trim_end_matches('/').to_owned();
    completed.bundle = Some(BundleSection {
        format: BUNDLE_FORMAT,
        component: querl_core::fsx::digest_hex(component),
        component_bytes: component.len() as u64,
    });
    completed
}

/// A text file that a bundle cannot do without.
fn text(folder: &Path, name: &str, meaning: &str) -> Result<Vec<u8>, BundleError> {
    let path = folder.join(name);
    if !path.exists() {
        return Err(BundleError::folder(&path, format!("is missing; a bundle needs it: {meaning}")));
    }
    let bytes = plain_file(&path, name)?;
    match std::str::from_utf8(&bytes).is_ok_and(|text| !text.trim().is_empty()) {
        true => Ok(bytes),
        false => Err(BundleError::folder(&path, "is empty or not UTF-8 text")),
    }
}

/// The golden cases by their names in the archive.
fn golden(folder: &Path, manifest: &Manifest) -> Result<BTreeMap<String, Vec<u8>>, BundleError> {
    let golden = folder.join(&manifest.plugin.golden);
    let mut files = BTreeMap::new();
    if !golden.exists() && manifest.plugin.golden == "golden" {
        return Ok(files);
    }
    let entries = std::fs::read_dir(&golden).map_err(|source| BundleError::io(&golden, source))?;
    for entry in entries {
        let path = entry.map_err(|source| BundleError::io(&golden, source))?.path();
        let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if !file.ends_with(names::GOLDEN_ENDING) {
            continue;
        }
        let name = format!("{}{file}", names::GOLDEN);
        if !is_golden(&name) {
            let message = "cannot be in a bundle; expected a name of at most 93 bytes that does not begin with a dot";
            return Err(BundleError::folder(&path, message));
        }
        let content = plain_file(&path, &name)?;
        files.insert(name, content);
    }
    Ok(files)
}

/// The content of a file, `name` in the archive, that is no link: a link could bring in what the author never meant to publish.
fn plain_file(path: &Path, name: &str) -> Result<Vec<u8>, BundleError> {
    let metadata = std::fs::symlink_metadata(path).map_err(|source| BundleError::io(path, source))?;
    match metadata.is_file() {
        true => file::read(path, ArchiveLimits::DEFAULT.bytes_of(name)),
        false => Err(BundleError::folder(path, "is not a plain file; a bundle takes no links and folders here")),
    }
}
