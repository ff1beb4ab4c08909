//! Serving of a releases folder: a service loads the current releases and follows changes.

use super::history::{Action, HistoryEntry, Release, ReleasesFolder, TenantReleases};
use super::promote::check_unchanged;
use crate::failure::Stop;
use crate::serving::{IdentityReader, ServedModels, ServedRun};
use querl_core::serving::{Candidate, ReleaseSource, Reloaded, Rewriter, Role};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// A releases folder, and the models of a service that follows its changes.
pub struct FollowedReleases {
    folder: ReleasesFolder,
    models: Arc<ServedModels>,
    find: fn(&Path) -> anyhow::Result<ServedRun>,
    /// Served releases by role and tenant.
    served: Mutex<BTreeMap<(Role, String), Release>>,
}

impl FollowedReleases {
    /// Current release and run of each tenant, for loading.
    ///
    /// # Errors
    /// There is no release, or the files of a release have changed since it was released.
    pub fn current_runs(
        folder: &ReleasesFolder,
        find: fn(&Path) -> anyhow::Result<ServedRun>,
    ) -> anyhow::Result<Vec<(Release, ServedRun)>> {
        let tenants = folder.tenants()?;
        let current = tenants.into_iter().filter_map(|(tenant, state)| Some((tenant, state.current?)));
        let mut identities = IdentityReader::default();
        let runs = current.map(|(tenant, release)| {
            let run = check_unchanged(folder, &tenant, &release, find, &mut identities)?;
            Ok((release, run))
        });
        let runs: Vec<_> = runs.collect::<anyhow::Result<_>>()?;
        match runs.is_empty() {
            true => {
                let path = folder.path().display();
                let remedy = format!("run `querl release promote RUN_DIR --releases {path}` first");
                Err(Stop::usage(format!("{path}: no releases here; {remedy}")).into())
            }
            false => Ok(runs),
        }
    }

    /// Starts following `folder`. `models` serve its current releases `loaded`, each with the name of its tenant.
    pub fn new(
        folder: ReleasesFolder,
        models: Arc<ServedModels>,
        find: fn(&Path) -> anyhow::Result<ServedRun>,
        loaded: Vec<(String, Release)>,
    ) -> Self {
        let served = loaded.into_iter().map(|(tenant, release)| ((Role::Current, tenant), release)).collect();
        Self { folder, models, find, served: Mutex::new(served) }
    }

    /// Loads a release, unless it is served already.
    fn serve(
        &self,
        served: &mut BTreeMap<(Role, String), Release>,
        role: Role,
        tenant: &str,
        release: &Release,
    ) -> Result<(), String> {
        let key = (role, tenant.to_owned());
        // The service removes the model of a candidate that it ended.
        let is_loaded = self.models.models(role).iter().any(|model| model.name == tenant);
        if is_loaded && served.get(&key).is_some_and(|served| served.identity == release.identity) {
            return Ok(());
        }
        let run = check_unchanged(&self.folder, tenant, release, self.find, &mut IdentityReader::default());
        let run = run.map_err(|error| format!("{error:#}"))?;
        self.models.load(run.dir.root(), role)?;
        served.insert(key, release.clone());
        Ok(())
    }
}

impl ReleaseSource for FollowedReleases {
    fn reload(&self) -> Result<Reloaded, String> {
        let tenants = self.folder.tenants().map_err(|error| format!("{error:#}"))?;
        let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        let mut reloaded = Reloaded::default();
        for (tenant, TenantReleases { current, candidate, .. }) in &tenants {
            let current =
                current.iter().try_for_each(|release| self.serve(&mut served, Role::Current, tenant, release));
            reloaded.problems.extend(current.err());
            match candidate {
                Some(candidate) => match self.serve(&mut served, Role::Candidate, tenant, &candidate.release) {
                    Ok(()) => {
                        let (tenant, id, mode) = (tenant.clone(), candidate.id, candidate.mode);
                        reloaded.candidates.push(Candidate { tenant, id, mode });
                    }
                    Err(problem) => reloaded.problems.push(problem),
                },
                None => {
                    served.remove(&(Role::Candidate, tenant.clone()));
                    self.models.remove(tenant, Role::Candidate);
                }
            }
        }
        Ok(reloaded)
    }

    fn end_candidate(&self, candidate: &Candidate, reason: &str) -> Result<(), String> {
        let ended = self.folder.append(|tenants| {
            let state = tenants.get(&candidate.tenant);
            let started = state.and_then(|state| state.candidate.as_ref()).filter(|started| started.id == candidate.id);
            Ok(started.map(|started| {
                let entry = HistoryEntry::new(&candidate.tenant, Action::AutomaticReturn, started.release.clone());
                HistoryEntry { reason: Some(reason.to_owned()), ..entry }
            }))
        });
        ended.map(drop).map_err(|error| format!("{error:#}"))
    }
}
