//! Filter plugins as an implementation of the port [`Filter`](querl_core::ports::Filter).

use crate::call::{Caller, DropDeadline};
use crate::limits::CallSize;
use querl_core::ports::{Filter, InputUse, PluginFault};
use querl_core::records::{Rejection, Sample, Verdict};

pub(crate) struct FilterPlugin {
    caller: Caller,
}

impl FilterPlugin {
    pub(crate) fn new(caller: Caller) -> Self {
        Self { caller }
    }

    fn run(&self, samples: &[&Sample], size: CallSize) -> Result<Vec<Verdict>, PluginFault> {
        self.caller.call("filters.check-batch", size, |guest| {
            self.caller.exports.contract.check_batch(guest, samples, self.caller.inputs.columns)
        })
    }

    fn checked(&self, samples: &[&Sample], verdicts: Vec<Verdict>) -> Result<Vec<Verdict>, PluginFault> {
        if verdicts.len() != samples.len() {
            return Err(self.caller.wrong_length(verdicts.len(), "verdicts", "sample", &ids(samples)));
        }
        let check = |(sample, result): (&&Sample, Verdict)| {
            verdict(&self.caller, result)
                .map_err(|message| self.caller.invalid_result(format!("sample `{}`: {message}", sample.id)))
        };
        samples.iter().zip(verdicts).map(check).collect()
    }

    /// Checks all samples. If one hits a limit, removes it and checks the others again, always with the fuel of all samples.
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

    /// Finds the first sample at which `batch` hits a limit, and the fault, by binary search over prefixes, because a verdict may depend on
    /// the samples before it. Each prefix has the fuel of all `n_batch` samples; with less, a sample that needs more than its share would
    /// be found.
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

fn verdict(caller: &Caller, result: Verdict) -> Result<Verdict, String> {
    match result {
        Verdict::Keep => Ok(Verdict::Keep),
        Verdict::Drop { code, detail } => caller
            .rejection(Rejection::new(code, detail))
            .map(|Rejection { code, detail, .. }| Verdict::Drop { code, detail }),
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

    fn reads_columns(&self) -> InputUse {
        self.caller.inputs.columns
    }

    fn name(&self) -> &str {
        &self.caller.name
    }
}
