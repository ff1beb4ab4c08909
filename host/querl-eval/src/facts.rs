//! Facts about a run that stand above its figures.

/// Someone whose word the figures rest on: a judge, a teacher, a retrieval service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Party {
    /// `gpt-5`, `rubric`; without a note that it stands in for another.
    pub name: String,
    /// True where it stands in for a real service: said wherever figures are shown.
    pub is_stand_in: bool,
}

impl Party {
    /// From a port's name, where `rubric (stand-in)` marks a stand-in.
    pub fn from_port_name(name: &str) -> Self {
        match name.trim_end().strip_suffix("(stand-in)") {
            Some(bare) => Self { name: bare.trim_end().to_owned(), is_stand_in: true },
            None => Self { name: name.to_owned(), is_stand_in: false },
        }
    }
}

impl std::fmt::Display for Party {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)?;
        if self.is_stand_in { f.write_str(" (stand-in)") } else { Ok(()) }
    }
}

/// Whose data, and whose word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunFacts {
    /// Tenant id.
    pub tenant: String,
    /// The trained model, as people call it.
    pub model: String,
    /// Who wrote the baseline rewrites.
    pub teacher: Party,
    /// Who judged; `None` where nobody did.
    pub judge: Option<Party>,
    /// What found and scored the passages.
    pub retrieval: Party,
    /// The plugins in use, a phrase each: `reward reward-brevity 0.1.0, weight 0.5`.
    pub plugins: Vec<String>,
    /// What a reader must know of them, a sentence each: a plugin that changed within the run, items dropped at limits.
    pub plugin_notes: Vec<String>,
}

impl RunFacts {
    /// One sentence per stand-in, for tables and reports.
    pub(crate) fn stand_in_notes(&self) -> Vec<String> {
        let parties = [
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
        let stand_ins = parties.into_iter().filter_map(|(role, party, meaning)| Some((role, party?, meaning)));
        stand_ins
            .filter(|(_, party, _)| party.is_stand_in)
            .map(|(role, party, meaning)| format!("the {role} ({}) is a stand-in: {meaning}", party.name))
            .collect()
    }
}

/// How long one stage took.
#[derive(Debug, Clone, PartialEq)]
pub struct StageTiming {
    /// `rewrite`, `sft`, ...
    pub stage: String,
    /// Wall-clock time.
    pub seconds: f64,
}

/// One step of the way from the query table to the dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunnelStep {
    /// `rows read`, `kept by the filters`.
    pub label: String,
    /// Rows that reached this step.
    pub n: u64,
    /// What the step was split into, or what left it and why: `("top1_below_threshold", 12)`, `("train", 288)`.
    pub parts: Vec<(String, u64)>,
}
