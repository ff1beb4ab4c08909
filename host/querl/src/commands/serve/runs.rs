//! The runs of `querl serve rewrite`, and what it loads again on SIGHUP: those of its command line, or the releases that it follows.

use crate::args::load_config;
use crate::{model_hub, terminal};
use querl_core::config::Overrides;
use querl_core::serving::{Rewriter, Role, Tenant};
use querl_pipeline::failure::check_run_or_config;
use querl_pipeline::serving::{ServedModels, ServedRun, deployed_runs};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The path, or the runs of a deployment there.
pub(super) fn run_folders(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    Ok(deployed_runs(path)?.unwrap_or_else(|| vec![path.to_owned()]))
}

/// The run in a folder, or that of a configuration.
pub fn served_run(path: &Path) -> anyhow::Result<ServedRun> {
    check_run_or_config(path)?;
    if path.is_dir() {
        return ServedRun::in_folder(path);
    }
    let overrides = Overrides { model_hub: Some(model_hub::find), ..Overrides::default() };
    ServedRun::in_folder(&load_config(path, overrides)?.output_dir)
}

pub(super) fn print_tenant(Tenant { name, version, source, .. }: &Tenant) {
    terminal::print(&format!("tenant {name}: version {version} of {source}"));
}

/// Calls `load` whenever the flag is set, for as long as the models compute.
pub(super) fn reload_when_asked(models: &ServedModels, reload: &AtomicBool, mut load: impl FnMut()) {
    while models.is_alive() {
        std::thread::sleep(Duration::from_millis(200));
        if reload.swap(false, Ordering::SeqCst) {
            load();
        }
    }
}

/// What cannot be loaded is reported, and the old model is still served.
pub(super) fn report_releases(loaded: Result<Vec<String>, String>) {
    match loaded {
        Ok(problems) => problems.iter().for_each(|problem| terminal::print(&format!("not loaded: {problem}"))),
        Err(problem) => terminal::print(&format!("the releases are not read again: {problem}")),
    }
}

/// The runs of the command line, with the tenants that are served of them. Tenants of `/admin/tenants` are not among them.
pub(super) struct NamedRuns {
    /// As they were named; a deployment may have other tenants by now.
    paths: Vec<PathBuf>,
    tenants: BTreeMap<PathBuf, Tenant>,
}

impl NamedRuns {
    /// `loaded`: folders of the runs, and the names of their tenants.
    pub(super) fn new(paths: Vec<PathBuf>, loaded: Vec<(PathBuf, String)>, models: &ServedModels) -> Self {
        let served = |(folder, name): (PathBuf, String)| Some((folder, models.tenant(&name)?));
        Self { paths, tenants: loaded.into_iter().filter_map(served).collect() }
    }

    /// Loads all of them again, and removes the tenants that are no longer of the command line.
    pub(super) fn load_again(&mut self, models: &ServedModels) {
        let mut before = std::mem::take(&mut self.tenants);
        for path in self.paths.clone() {
            match run_folders(&path) {
                Ok(folders) => folders.iter().for_each(|folder| self.load_run(models, folder, before.remove(folder))),
                Err(problem) => {
                    terminal::print(&format!("not loaded again: {problem:#}"));
                    self.tenants.extend(before.extract_if(.., |folder, _| folder.starts_with(&path)));
                }
            }
        }
        before.values().for_each(|tenant| remove(models, tenant));
    }

    /// Loads a run in the place of `before`, which stays where the run cannot be loaded.
    fn load_run(&mut self, models: &ServedModels, folder: &Path, before: Option<Tenant>) {
        let loaded = check_free(models, folder, before.as_ref()).and_then(|()| models.load(folder, Role::Current));
        let tenant = match loaded {
            Ok(tenant) => {
                print_tenant(&tenant);
                before.iter().filter(|before| before.name != tenant.name).for_each(|before| remove(models, before));
                Some(tenant)
            }
            Err(problem) => {
                terminal::print(&format!("not loaded again: {problem}"));
                before
            }
        };
        self.tenants.extend(tenant.map(|tenant| (folder.to_owned(), tenant)));
    }
}

/// Refuses a run that would replace the tenant of another one.
fn check_free(models: &ServedModels, folder: &Path, before: Option<&Tenant>) -> Result<(), String> {
    let name = served_run(folder).map_err(|error| format!("{error:#}"))?.config.tenant;
    let other = models.tenant(&name).filter(|_| before.is_none_or(|before| before.name != name));
    other.map_or(Ok(()), |other| {
        Err(format!("{}: is of tenant `{name}`, which {} serves", folder.display(), other.source))
    })
}

/// Removes a tenant that the command line no longer has, unless another run was loaded in its place by `/admin/tenants`.
fn remove(models: &ServedModels, Tenant { name, source, .. }: &Tenant) {
    if models.tenant(name).is_some_and(|served| served.source == *source) && models.remove(name, Role::Current) {
        terminal::print(&format!("tenant {name}: removed, since {source} is no longer a run of this tenant"));
    }
}
