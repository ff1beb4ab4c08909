//! Filter plugins behind the port.

use crate::bindings::filters;
use crate::call::Caller;
use crate::convert;
use querl_core::ports::{Filter, PluginFault};
use querl_core::records::{Sample, Verdict};

/// A configured filter plugin.
pub(crate) struct FilterPlugin {
    caller: Caller,
    indices: filters::GuestIndices,
}

impl FilterPlugin {
    pub(crate) fn new(caller: Caller, indices: filters::GuestIndices) -> Self {
        Self { caller, indices }
    }

    fn run(&self, samples: &[Sample]) -> Result<Vec<filters::Verdict>, PluginFault> {
        let hits: Vec<_> = samples.iter().map(|sample| convert::hits(&sample.hits)).collect();
        let arguments: Vec<_> = samples.iter().zip(&hits).map(|(sample, hits)| convert::sample(sample, hits)).collect();
        self.caller.call(samples.len(), |store, instance| {
            self.indices.load(&mut *store, instance)?.call_check_batch(store, &arguments)
        })
    }
}

fn checked(verdict: filters::Verdict) -> Result<Verdict, String> {
    match verdict {
        filters::Verdict::Keep => Ok(Verdict::Keep),
        filters::Verdict::Drop(reason) => {
            convert::rejection(reason).map(|reason| Verdict::Drop { code: reason.code, detail: reason.detail })
        }
    }
}

fn ids(samples: &[Sample]) -> Vec<&str> {
    samples.iter().map(|sample| sample.id.as_str()).collect()
}

impl Filter for FilterPlugin {
    fn check_batch(&self, samples: &[Sample]) -> Result<Vec<Verdict>, PluginFault> {
        if samples.is_empty() {
            return Ok(Vec::new());
        }
        let verdicts = self.run(samples).map_err(|fault| {
            let alone = |index: usize| self.run(&samples[index..=index]).map(drop);
            self.caller.located(fault, "sample", &ids(samples), alone)
        })?;
        if verdicts.len() != samples.len() {
            return Err(self.caller.wrong_length(verdicts.len(), "verdicts", "sample", &ids(samples)));
        }
        let check = |(sample, verdict): (&Sample, filters::Verdict)| {
            checked(verdict).map_err(|message| self.caller.fault(format!("sample `{}`: {message}", sample.id)))
        };
        samples.iter().zip(verdicts).map(check).collect()
    }

    fn name(&self) -> &str {
        &self.caller.name
    }
}
