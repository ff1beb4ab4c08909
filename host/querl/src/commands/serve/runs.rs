//! The runs that `querl serve rewrite` serves, and their reload on SIGHUP: those of the command line, or the releases of a folder.

use crate::args::load_config;
use crate::{model_hub, terminal};
use querl_core::config::Overrides;
use querl_core::serving::{Rewriter, Role, Tenant};
use querl_pipeline::failure::check_run_or_config;
use querl_pipeline::serving::{ServedModels, ServedRun, deployed_runs};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Folders of the runs at a path: those of a deployment, or else the path itself.
pub(super) fn run_folders(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    Ok(deployed_runs(path)?.unwrap_or_else(|| vec![path.to_owned()]))
}

/// Opens the run in a folder, or the run of a configuration file.
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

/// Calls `load` whenever the flag `reload` is set, until the served models have ended.
pub(super) fn reload_when_asked(models: &ServedModels, reload: &AtomicBool, mut load: impl FnMut()) {
    while models.is_alive() {
        std::thread::sleep(Duration::from_millis(200));
        if reload.swap(false, Ordering::SeqCst) {
            load();
        }
    }
}

/// Prints warnings about releases that could not be loaded; the models before them are still served.
pub(super) fn report_releases(loaded: Result<Vec<String>, String>) {
    match loaded {
        Ok(problems) => problems.iter().for_each(|problem| terminal::print(&format!("not loaded: {problem}"))),
        Err(problem) => terminal::print(&format!("the releases are not read again: {problem}")),
    }
}

/// The runs that the command line names, with the tenants that are served from them. Tenants loaded by `/admin/tenants` are not
/// included.
pub(super) struct NamedRuns {
    /// The arguments, because a deployment may have other tenants by the next reload.
    paths: Vec<PathBuf>,
    /// Tenants with a key of their own; empty if no tenant has one, or if all others need the key of `--api_key_env`.
    with_key: BTreeSet<String>,
    tenants: Vec<(PathBuf, Tenant)>,
}

impl NamedRuns {
    /// The runs that were loaded at the start. `loaded`: folders of the runs, and the names of their tenants.
    pub(super) fn new(
        paths: Vec<PathBuf>,
        with_key: BTreeSet<String>,
        loaded: Vec<(PathBuf, String)>,
        models: &ServedModels,
    ) -> Self {
        let served = |(folder, name): (PathBuf, String)| Some((folder, models.tenant(&name)?));
        Self { paths, with_key, tenants: loaded.into_iter().filter_map(served).collect() }
    }

    /// Loads all runs again, and removes tenants that the command line no longer names. A tenant whose new run cannot be loaded
    /// is still served from the old one. Prints what is served, or that nothing has changed.
    pub(super) fn load_again(&mut self, models: &ServedModels) {
        let mut before = std::mem::take(&mut self.tenants);
        // All runs are read before one is loaded, because a tenant may have moved from one run to another.
        let mut runs: Vec<(PathBuf, String)> = Vec::new();
        let mut not_loaded: BTreeSet<String> = BTreeSet::new();
        let n_before = before.len();
        for path in self.paths.clone() {
            let folders = run_folders(&path).unwrap_or_else(|problem| {
                self.keep(&path, &format!("{problem:#}"), &mut before);
                Vec::new()
            });
            for folder in folders {
                match served_run(&folder) {
                    Ok(run) => runs.push((folder, run.config.tenant)),
                    Err(problem) => {
                        // The tenant's name is unknown; in a deployment it is the folder's.
                        not_loaded.extend(folder.file_name().map(|name| name.to_string_lossy().into_owned()));
                        self.keep(&folder, &format!("{problem:#}"), &mut before);
                    }
                }
            }
        }
        let (mut loaded, mut has_changed): (Vec<(PathBuf, Tenant)>, bool) = (Vec::new(), false);
        for (folder, name) in &runs {
            let served = models.tenant(name);
            let free = self.check_tenant_is_free(models, (folder.as_path(), name.as_str()), &runs, &before);
            match free.and_then(|()| models.load(folder, Role::Current)) {
                Ok(tenant) => {
                    has_changed |= !served.is_some_and(|old| is_same(&old, &tenant) && old.version == tenant.version);
                    let is_new = !before.iter().any(|(known, old)| known == folder && old.name == tenant.name);
                    if is_new && !self.with_key.is_empty() && !self.with_key.contains(&tenant.name) {
                        terminal::print(&format!("warning: no key is required of tenant `{}`", tenant.name));
                    }
                    loaded.push((folder.clone(), tenant));
                }
                Err(problem) => {
                    not_loaded.insert(name.clone());
                    self.keep(folder, &problem, &mut before);
                }
            }
        }
        match has_changed || loaded.len() != n_before {
            true => loaded.iter().for_each(|(_, tenant)| print_tenant(tenant)),
            false => terminal::print(&format!("loaded again: nothing has changed; tenants: {n_before}")),
        }
        self.tenants.extend(loaded);
        for (folder, old) in before {
            let has_name = self.tenants.iter().any(|(_, tenant)| tenant.name == old.name);
            if !has_name && not_loaded.contains(&old.name) {
                self.tenants.push((folder, old));
            } else if !self.tenants.iter().any(|(_, tenant)| is_same(tenant, &old)) {
                remove(models, &old);
            }
        }
    }

    /// Warns that a run cannot be loaded again. Tenants that were loaded from its folder before are still served.
    fn keep(&mut self, folder: &Path, problem: &str, before: &mut Vec<(PathBuf, Tenant)>) {
        self.tenants.extend(before.extract_if(.., |(known, _)| known.starts_with(folder)));
        terminal::print(&format!("warning: not loaded again: {problem}"));
    }

    /// Refuses a run whose tenant is served from another run, or whose tenant has no key although the run's previous tenant had one.
    fn check_tenant_is_free(
        &self,
        models: &ServedModels,
        (folder, name): (&Path, &str),
        runs: &[(PathBuf, String)],
        before: &[(PathBuf, Tenant)],
    ) -> Result<(), String> {
        let path = folder.display();
        let mut own = before.iter().filter(|(known, _)| known == folder).map(|(_, tenant)| tenant);
        if own.clone().any(|own| own.name == name) {
            return Ok(());
        }
        let has_key = |name: &str| self.with_key.contains(name);
        if let Some(own) = own.find(|own| has_key(&own.name) && !has_key(name)) {
            let remedy = format!("restart with --tenant_key_env {name}=NAME");
            return Err(format!("{path}: tenant `{name}` has no key, and `{}` had one; {remedy}", own.name));
        }
        let Some(other) = models.tenant(name) else { return Ok(()) };
        let is_run = |known: &Path| runs.iter().any(|(run, tenant)| run == known && tenant == name);
        match before.iter().any(|(known, tenant)| is_same(tenant, &other) && !is_run(known)) {
            true => Ok(()),
            false => Err(format!("{path} has tenant `{name}`, which is served from {}", other.source)),
        }
    }
}

fn is_same(one: &Tenant, other: &Tenant) -> bool {
    one.name == other.name && one.source == other.source
}

/// Removes a tenant that the command line no longer names, unless `/admin/tenants` has loaded another run in its place.
fn remove(models: &ServedModels, Tenant { name, source, .. }: &Tenant) {
    if models.tenant(name).is_some_and(|served| served.source == *source) && models.remove(name, Role::Current) {
        terminal::print(&format!("tenant {name}: removed, since {source} is no longer a run of this tenant"));
    }
}
