//! Options of the request log of `querl serve rewrite`.

use crate::args::{parse_settings, usage};
use clap::Args;
use querl_core::config::PluginLimits;
use querl_core::ports::{Filter, InputUse};
use querl_pipeline::host_functions::RunHostFunctions;
use querl_pipeline::plugins::open_host;
use querl_plugin::{PluginKind, PluginPort, SourceFolders};
use querl_serve::RequestLogOptions;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub(super) struct RequestLogArgs {
    /// A folder for a log of queries, rewrites and feedback, one file per day, from which `querl data from-log` makes a query table
    #[arg(long, visible_alias = "request-log", value_name = "DIR")]
    request_log: Option<PathBuf>,
    /// Maximum size of the log; the oldest day is removed first
    #[arg(long, visible_alias = "request-log-mib", value_name = "MIB", default_value_t = 1024, requires = "request_log", value_parser = clap::value_parser!(u32).range(1..))]
    request_log_mib: u32,
    /// Days of the log that are kept
    #[arg(long, visible_alias = "request-log-days", value_name = "N", default_value_t = 30, requires = "request_log", value_parser = clap::value_parser!(u32).range(1..=36_500))]
    request_log_days: u32,
    /// A filter plugin, as a bundle, component or source folder; requests that it drops are logged without their texts
    #[arg(long, visible_alias = "request-log-filter", value_name = "PATH", requires = "request_log")]
    request_log_filter: Option<PathBuf>,
    /// A setting of the filter plugin, such as max_chars=40, not a key of a configuration: a TOML value; a bare word is a string
    #[arg(
        long,
        visible_alias = "request-log-filter-settings",
        value_name = "KEY=VALUE",
        requires = "request_log_filter"
    )]
    request_log_filter_settings: Vec<String>,
}

impl RequestLogArgs {
    pub(super) fn open(&self) -> anyhow::Result<Option<RequestLogOptions>> {
        let Some(folder) = self.request_log.clone() else { return Ok(None) };
        if folder.exists() && !folder.is_dir() {
            return Err(usage(format!("--request_log: {} is a file; expected a folder", folder.display())).into());
        }
        Ok(Some(RequestLogOptions {
            folder,
            max_bytes: u64::from(self.request_log_mib) << 20,
            max_days: self.request_log_days,
            filter: self.request_log_filter.as_deref().map(|path| self.filter(path)).transpose()?,
        }))
    }

    fn filter(&self, path: &Path) -> anyhow::Result<Box<dyn Filter>> {
        let settings = parse_settings(&self.request_log_filter_settings, "--request_log_filter_settings")?;
        let host = open_host(&PluginLimits::default(), &[], SourceFolders::Build)?;
        let plugin = host.load(path)?;
        if !plugin.kinds().contains(&PluginKind::Filter) {
            let what = format!("--request_log_filter: {}: plugin {} is no filter", path.display(), plugin.id());
            return Err(usage(what).into());
        }
        let functions = Arc::new(RunHostFunctions::of_filters(None));
        let filter = host.open(&plugin, &settings, PluginPort::filter().with_functions(Some(functions)))?;
        if filter.reads_columns() == InputUse::Required {
            let what = "requires the columns of a query table, which requests do not have; name another filter";
            return Err(usage(format!("--request_log_filter: {}: {what}", path.display())).into());
        }
        Ok(filter)
    }
}
