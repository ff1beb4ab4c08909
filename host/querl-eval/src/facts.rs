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
}

impl RunFacts {
    /// One sentence per stand-in, for tables and reports.
    pub(crate) fn stand_in_notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if let Some(judge) = self.judge.as_ref().filter(|judge| judge.is_stand_in) {
            notes.push(format!("judge `{}` is a stand-in: fixed rules, not a language model; judge scores say little about people's taste", judge.name));
        }
        if self.teacher.is_stand_in {
            notes.push(format!("teacher `{}` is a stand-in: rewrites recorded beforehand, so its latency and cost are not measured here", self.teacher.name));
        }
        if self.retrieval.is_stand_in {
            notes.push(format!("retrieval `{}` is a stand-in for the tenant's service", self.retrieval.name));
        }
        notes
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
