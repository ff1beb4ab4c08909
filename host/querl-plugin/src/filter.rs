//! Filter plugins behind the port.

use crate::bindings::filters;
use crate::call::{Caller, DropDeadline};
use crate::convert;
use crate::limits::CallSize;
use querl_core::ports::{Filter, PluginFault};
use querl_core::records::{Sample, Verdict};

pub(crate) struct FilterPlugin {
    caller: Caller,
    indices: filters::GuestIndices,
}

impl FilterPlugin {
    pub(crate) fn new(caller: Caller, indices: filters::GuestIndices) -> Self {
        Self { caller, indices }
    }

    fn run(&self, samples: &[&Sample], size: CallSize) -> Result<Vec<filters::Verdict>, PluginFault> {
        let hits: Vec<_> = samples.iter().map(|sample| convert::hits(&sample.hits)).collect();
        let arguments: Vec<_> = samples.iter().zip(&hits).map(|(sample, hits)| convert::sample(sample, hits)).collect();
        self.caller.call("filters.check-batch", size, |store, instance| {
            self.indices.load(&mut *store, instance)?.call_check_batch(store, &arguments)
        })
    }

    fn checked(&self, samples: &[&Sample], verdicts: Vec<filters::Verdict>) -> Result<Vec<Verdict>, PluginFault> {
        if verdicts.len() != samples.len() {
            return Err(self.caller.wrong_length(verdicts.len(), "verdicts", "sample", &ids(samples)));
        }
        let check = |(sample, result): (&&Sample, filters::Verdict)| {
            verdict(&self.caller, result)
                .map_err(|message| self.caller.invalid_result(format!("sample `{}`: {message}", sample.id)))
        };
        samples.iter().zip(verdicts).map(check).collect()
    }

    /// Checks all samples; when one hits a limit, removes it and checks the others again, always with the fuel of all samples.
    fn dropping(&self, samples: &[Sample], mut fault: PluginFault) -> Result<Vec<Verdict>, PluginFault> {
        let deadline = self.caller.drop_deadline();
        let mut left: Vec<&Sample> = samples.iter().collect();
        // With the index in `left` at that time: verdicts are inserted at these indices in reverse order.
        let mut dropped = Vec::new();
        let mut verdicts = loop {
            let (place, why) = self.culprit(&left, fault, samples.len(), deadline)?;
            let sample = left.remove(place);
            dropped.push((place, self.caller.dropped(&why, "sample", &sample.id)?));
            if left.is_empty() {
                break Vec::new();
            }
            self.caller.check_drop_deadline(deadline, "sample", &ids(&left))?;
            match self.run(&left, CallSize::part_of(samples.len(), left.len())) {
                Ok(result) => break self.checked(&left, result)?,
                Err(next) if self.caller.drops(&next) => fault = next,
                Err(other) => return Err(self.caller.in_batch(&other, "sample", &ids(&left))),
            }
        };
        for (place, reason) in dropped.into_iter().rev() {
            verdicts.insert(place, Verdict::Drop { code: reason.code, detail: reason.detail });
        }
        Ok(verdicts)
    }

    /// The first sample with which `batch` hits a limit, and the fault, by binary search over prefixes: a verdict may depend on the
    /// samples before it. Each prefix has the fuel of all `n_batch` samples; with less, a sample that needs more than its share
    /// would be found.
    fn culprit(
        &self,
        batch: &[&Sample],
        fault: PluginFault,
        n_batch: usize,
        deadline: DropDeadline,
    ) -> Result<(usize, PluginFault), PluginFault> {
        // The first `within` samples stay within the limits, the first `beyond` do not.
        let (mut within, mut beyond, mut why) = (0, batch.len(), fault);
        while beyond - within > 1 {
            let middle = within + (beyond - within) / 2;
            self.caller.check_drop_deadline(deadline, "sample", &ids(batch))?;
            match self.run(&batch[..middle], CallSize::part_of(n_batch, middle)) {
                Ok(_) => within = middle,
                Err(fault) if self.caller.drops(&fault) => (beyond, why) = (middle, fault),
                Err(fault) => return Err(self.caller.in_batch(&fault, "sample", &ids(&batch[..middle]))),
            }
        }
        Ok((within, why))
    }
}

fn verdict(caller: &Caller, result: filters::Verdict) -> Result<Verdict, String> {
    match result {
        filters::Verdict::Keep => Ok(Verdict::Keep),
        filters::Verdict::Drop(reason) => {
            caller.rejection(reason).map(|reason| Verdict::Drop { code: reason.code, detail: reason.detail })
        }
    }
}

fn ids<'a>(samples: &[&'a Sample]) -> Vec<&'a str> {
    samples.iter().map(|sample| sample.id.as_str()).collect()
}

impl Filter for FilterPlugin {
    fn check_batch(&self, samples: &[Sample]) -> Result<Vec<Verdict>, PluginFault> {
        if samples.is_empty() {
            return Ok(Vec::new());
        }
        let batch: Vec<_> = samples.iter().collect();
        match self.run(&batch, CallSize::of(batch.len())) {
            Ok(result) => self.checked(&batch, result),
            Err(fault) if self.caller.drops(&fault) => self.dropping(samples, fault),
            Err(fault) => {
                let size = CallSize::part_of(batch.len(), 1);
                let alone = |index: usize| self.run(&batch[index..=index], size).map(drop);
                Err(self.caller.locate(fault, "sample", &ids(&batch), alone))
            }
        }
    }

    fn name(&self) -> &str {
        &self.caller.name
    }
}
