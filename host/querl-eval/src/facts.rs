//! Facts about a run that its report shows: tenant, model, services, plugins, stage times.

/// Name of a judge, a teacher or a retrieval service, and whether it is a stand-in for a real one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceName {
    /// Name such as `gpt-5` or `rubric`, without the suffix `(stand-in)`.
    pub name: String,
    /// True if it replaces a real service; every table and report says so.
    pub is_stand_in: bool,
}

impl ServiceName {
    /// Parses the name that a port reports; a stand-in has a suffix: `rubric (stand-in)`.
    pub fn from_port_name(name: &str) -> Self {
        match name.trim_end().strip_suffix("(stand-in)") {
            Some(bare) => Self { name: bare.trim_end().to_owned(), is_stand_in: true },
            None => Self { name: name.to_owned(), is_stand_in: false },
        }
    }
}

impl std::fmt::Display for ServiceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)?;
        if self.is_stand_in { f.write_str(" (stand-in)") } else { Ok(()) }
    }
}

/// The tenant, the model and the services of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunFacts {
    /// Tenant id.
    pub tenant: String,
    /// Name of the trained model.
    pub model: String,
    /// Name of the model that wrote the baseline rewrites.
    pub teacher: ServiceName,
    /// Name of the judge; `None` for a run without one.
    pub judge: Option<ServiceName>,
    /// Name of the service that retrieves and scores passages.
    pub retrieval: ServiceName,
    /// The plugins in use, one phrase each: `reward reward-brevity 0.1.0, weight 0.5`.
    pub plugins: Vec<String>,
    /// Warnings about the plugins, one sentence each, such as a version that changed within the run or items dropped at limits.
    pub plugin_notes: Vec<String>,
}

impl RunFacts {
    /// One sentence per stand-in service, for tables and reports.
    pub(crate) fn stand_in_notes(&self) -> Vec<String> {
        let services = [
            (
                "judge",
                self.judge.as_ref(),
                "fixed rules, not a language model, so its scores say little about people's taste",
            ),
            (
                "teacher",
                Some(&self.teacher),
                "its rewrites were recorded beforehand, and any latency or cost of it too",
            ),
            ("retrieval", Some(&self.retrieval), "the tenant's own service may find and score differently"),
        ];
        let stand_ins = services.into_iter().filter_map(|(role, service, meaning)| {
            Some((role, service.filter(|service| service.is_stand_in)?, meaning))
        });
        stand_ins
            .map(|(role, service, meaning)| format!("the {role} ({}) is a stand-in: {meaning}", service.name))
            .collect()
    }
}

/// Wall-clock time of one stage.
#[derive(Debug, Clone, PartialEq)]
pub struct StageTiming {
    /// Name of the stage: `rewrite`, `sft`, ...
    pub stage: String,
    /// Wall-clock seconds.
    pub seconds: f64,
}

/// One step of the data flow from the query table to the dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunnelStep {
    /// Label of the step: `rows read`, `kept by the filters`.
    pub label: String,
    /// Rows that reached this step.
    pub n: u64,
    /// The rows of the step by split (`("train", 288)`), or the rows that were dropped by reason (`("top1_below_threshold", 12)`).
    pub parts: Vec<(String, u64)>,
}
