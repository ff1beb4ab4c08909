//! Promotion of a run to a release, and rollback to the previous release.

use super::check::passed_check;
use super::history::{Action, CandidateRelease, HistoryEntry, Release, ReleasesFolder, Replaced, TenantReleases};
use crate::failure::Stop;
use crate::ledger::listing;
use crate::serving::{BASE_MODEL, IdentityReader, ServedRun};
use querl_core::serving::CandidateMode;
use querl_core::text::nearest;
use std::collections::BTreeMap;
use std::path::Path;

/// Options of a promotion.
#[derive(Debug, Clone, Default)]
pub struct PromoteOptions {
    /// `Some`: release the run as a candidate (canary or shadow) next to the current release; `None`: as the current release.
    pub candidate: Option<CandidateMode>,
    /// Reason for a promotion without a passed check; `None`: a check is required.
    pub without_check: Option<String>,
    /// User who promotes the run, for the history.
    pub who: Option<String>,
}

/// Makes a run the current release of its tenant, or a candidate. Returns the entry of the history, or `None` if nothing changes because
/// the run already has this role.
///
/// # Errors
/// A file of the run differs from what its stages wrote, no check against the current release has passed, a check is lost, or the run
/// cannot be a candidate.
pub fn promote(
    folder: &ReleasesFolder,
    run: &ServedRun,
    options: &PromoteOptions,
) -> anyhow::Result<Option<HistoryEntry>> {
    let (identity, tenant) = (IdentityReader::default().read(run)?, run.config.tenant.as_str());
    let release = Release { run: folder.relative(run.dir.root())?, identity };
    folder.append(|tenants| {
        let state = tenants.get(tenant).cloned().unwrap_or_default();
        let name = run.dir.root().display();
        if let Some(CandidateRelease { release: candidate, .. }) = &state.candidate
            && candidate.identity != release.identity
        {
            let other = folder.run_folder(candidate);
            let remedy = format!("promote that one, or end it by `querl release rollback --tenant {tenant}`");
            return Err(Stop::usage(format!(
                "{name}: {} is a candidate of tenant `{tenant}`; {remedy}",
                other.display()
            ))
            .into());
        }
        let is_current = state.current.as_ref().is_some_and(|current| current.identity == release.identity);
        match options.candidate {
            None if is_current => return Ok(None),
            None => {}
            Some(_) if is_current => {
                return Err(Stop::usage(format!("{name}: it serves tenant `{tenant}` already")).into());
            }
            Some(mode) => {
                if state.candidate.as_ref().is_some_and(|candidate| candidate.mode == mode) {
                    return Ok(None);
                }
                check_candidate(&name, tenant, &state, &release)?;
            }
        }
        let current = state.current.as_ref().map(|current| (folder.run_folder(current), &current.identity));
        let current = current.as_ref().map(|(folder, identity)| (folder.as_path(), *identity));
        let evidence = match options.without_check {
            Some(_) => None,
            None => Some(passed_check(&run.dir, &release.identity, current)?),
        };
        let action = match options.candidate {
            None => Action::Promote,
            Some(CandidateMode::Canary(_)) => Action::Canary,
            Some(CandidateMode::Shadow) => Action::Shadow,
        };
        let share = match options.candidate {
            Some(CandidateMode::Canary(share)) => Some(share),
            _ => None,
        };
        let replaced = state.current.as_ref().filter(|_| action == Action::Promote).map(replaced);
        let (reason, who) = (options.without_check.clone(), options.who.clone());
        let entry = HistoryEntry::new(tenant, action, release.clone());
        Ok(Some(HistoryEntry { share, replaced, evidence, reason, who, ..entry }))
    })
}

fn replaced(release: &Release) -> Replaced {
    Replaced { run: release.run.clone(), version: release.identity.version.clone() }
}

fn check_candidate(
    name: &impl std::fmt::Display,
    tenant: &str,
    state: &TenantReleases,
    release: &Release,
) -> anyhow::Result<()> {
    let Some(current) = &state.current else {
        let message =
            format!("{name}: nothing serves tenant `{tenant}` yet; promote it without --canary and --shadow first");
        return Err(Stop::usage(message).into());
    };
    if current.identity.digests.get(BASE_MODEL) != release.identity.digests.get(BASE_MODEL) {
        let message = format!(
            "{name}: its base model is not that of the current run, and one server has one; promote it without --canary and --shadow"
        );
        return Err(Stop::usage(message).into());
    }
    Ok(())
}

/// Ends the candidate of a tenant; without a candidate, returns to the previous release.
///
/// # Errors
/// There is no such tenant or no previous release, or the files of the previous release are missing or changed.
pub fn rollback(
    folder: &ReleasesFolder,
    tenant: Option<&str>,
    who: Option<String>,
    find: fn(&Path) -> anyhow::Result<ServedRun>,
) -> anyhow::Result<HistoryEntry> {
    let appended = folder.append(|tenants| {
        let (tenant, state) = select(folder, tenants, tenant)?;
        if let Some(CandidateRelease { release, .. }) = &state.candidate {
            let entry = HistoryEntry::new(tenant, Action::EndCandidate, release.clone());
            return Ok(Some(HistoryEntry { who: who.clone(), ..entry }));
        }
        let nothing = || Stop::usage(format!("{}: nothing served tenant `{tenant}` before", folder.path().display()));
        let earlier = state.earlier.last().ok_or_else(nothing)?;
        check_unchanged(folder, tenant, earlier, find, &mut IdentityReader::default())?;
        let entry = HistoryEntry::new(tenant, Action::Rollback, earlier.clone());
        Ok(Some(HistoryEntry { replaced: state.current.as_ref().map(replaced), who: who.clone(), ..entry }))
    })?;
    Ok(appended.expect("an entry is made or an error"))
}

/// The releases of the named tenant, or of the only tenant if none is named.
pub(super) fn select<'a>(
    folder: &ReleasesFolder,
    tenants: &'a BTreeMap<String, TenantReleases>,
    name: Option<&str>,
) -> anyhow::Result<(&'a str, &'a TenantReleases)> {
    let path = folder.path().display();
    let found = match name {
        Some(name) => tenants.get_key_value(name),
        None if tenants.len() == 1 => tenants.first_key_value(),
        None => None,
    };
    if let Some((name, state)) = found {
        return Ok((name, state));
    }
    let names = |names: Vec<&str>| names.iter().take(8).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let known = || tenants.keys().map(String::as_str);
    let message = match name {
        _ if tenants.is_empty() => format!("{path}: no releases here; run `querl release promote RUN_DIR` first"),
        None => format!("{path}: {} tenants; name one by --tenant: {}", tenants.len(), names(known().collect())),
        Some(name) => {
            let near = nearest(name, known());
            let near = if near.is_empty() { known().collect() } else { near };
            format!("{path}: no tenant `{name}`; found {}", names(near))
        }
    };
    Err(Stop::usage(message).into())
}

/// Opens the run of a release, after a check that its files are those that were released.
///
/// # Errors
/// The run or a file of it is missing, or a file has changed; the message names the files.
pub(super) fn check_unchanged(
    folder: &ReleasesFolder,
    tenant: &str,
    release: &Release,
    find: fn(&Path) -> anyhow::Result<ServedRun>,
    identities: &mut IdentityReader,
) -> anyhow::Result<ServedRun> {
    let path = folder.run_folder(release);
    let name = path.display();
    if !path.is_dir() {
        return Err(Stop::usage(format!("{name}: the folder of the released run is gone; put it back")).into());
    }
    let run = find(&path)?;
    let own = &run.config.tenant;
    if own != tenant {
        return Err(Stop::usage(format!(
            "{name}: its tenant is `{own}`, and it was released for `{tenant}`; put its files back"
        ))
        .into());
    }
    let changed = identities.read(&run)?.changed_since(&release.identity);
    if changed.is_empty() {
        return Ok(run);
    }
    let message = format!(
        "{name}: {} changed since the release of version {}; put them back, or promote the run as it is now",
        listing(&changed),
        release.identity.version
    );
    Err(Stop::usage(message).into())
}
