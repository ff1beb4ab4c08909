//! GPU memory: the memory plan that is checked before a stage, and advice after an out-of-memory error.

use crate::device::UsedGpu;
use crate::failure::Stop;
use querl_core::config::{Config, DeviceSetting};
use querl_core::ports::Progress;
use querl_model::DecoderConfig;
use querl_train::job::memory_plan::{DeviceSizes, MemoryPlan, MemoryRequest, PlannedStage, advise, gibibytes};
use querl_train::job::{Failure, FailureKind, JobError};

/// After an out-of-memory error, advice is computed for this share of the planned memory.
const SHARE_AFTER_FAILURE: f64 = 0.85;

pub(crate) fn request(config: &Config, stage: PlannedStage) -> anyhow::Result<MemoryRequest> {
    let shapes = DecoderConfig::load(&config.model.path.join("config.json"))?;
    let n_devices = DeviceSetting::from_name(&config.device).map_or(1, |device| device.n_ranks());
    Ok(MemoryRequest { shapes, model: config.model.clone(), stage, types: DeviceSizes::GPU, n_devices })
}

/// Reports the planned memory of a stage, with a warning if it may not fit on the GPU; an error if base and adapters alone do not fit. Does
/// nothing on the CPU.
pub(crate) fn check(gpu: Option<&UsedGpu>, request: &MemoryRequest, progress: &dyn Progress) -> Result<(), Stop> {
    let Some((gpu, free)) = gpu.and_then(|gpu| Some((gpu, gpu.free_bytes?))) else { return Ok(()) };
    let plan = MemoryPlan::new(request);
    if plan.certain() > free {
        return Err(Stop::usage(shortage(gpu, request, free)));
    }
    match plan.total() > free {
        // The plan is an upper bound for the longest rows; shorter ones may fit.
        true => progress.line(&format!("warning: {}", shortage(gpu, request, free))),
        false => progress.line(&format!("memory: {} of {} free", needs(&plan), gibibytes(free))),
    }
    Ok(())
}

/// Adds advice on which setting to change to an out-of-memory error; returns other errors unchanged.
pub(crate) fn explain(gpu: Option<&UsedGpu>, request: &MemoryRequest, error: JobError) -> JobError {
    match (error, gpu) {
        (JobError::Failed(Failure { kind: FailureKind::OutOfMemory, message }), Some(gpu)) => {
            let free = gpu.free_bytes.unwrap_or(gpu.gpu.memory_bytes);
            let planned = (MemoryPlan::new(request).total() as f64 * SHARE_AFTER_FAILURE) as u64;
            let advice = advise(request, free.min(planned)).map_or_else(no_advice, |advice| advice.to_string());
            Failure { kind: FailureKind::OutOfMemory, message: format!("{message}; {advice}") }.into()
        }
        (error, _) => error,
    }
}

/// The planned GPU memory of each training stage of a configuration, one line each, with rows of maximum length.
pub fn memory_of_config(config: &Config) -> anyhow::Result<Vec<String>> {
    let (sft, longest_row) = (config.sft.clone(), config.sft.max_length);
    let longest_prompt = longest_row.saturating_sub(config.rl.max_new_tokens);
    let rl = PlannedStage::Rl { config: Box::new(config.rl.clone()), lora: sft.clone(), longest_prompt };
    let line = |stage: PlannedStage| {
        let request = request(config, stage)?;
        let (name, needs) = (request.stage.name(), needs(&MemoryPlan::new(&request)));
        Ok(format!("{name}: {needs}, with rows of {longest_row} tokens"))
    };
    [PlannedStage::Sft { config: sft, longest_row }, rl].into_iter().map(line).collect()
}

fn shortage(gpu: &UsedGpu, request: &MemoryRequest, free: u64) -> String {
    let needs = needs(&MemoryPlan::new(request));
    let (index, free_text) = (gpu.index, gibibytes(free));
    let advice = advise(request, free).map_or_else(no_advice, |advice| advice.to_string());
    format!("{} {needs}, and cuda:{index} has {free_text} free: {advice}", request.stage.name())
}

fn no_advice() -> String {
    "no setting makes it fit; take a smaller model or a larger GPU".into()
}

/// `takes about 12.3 GiB (base 8.1, activations 4.0, reserve 0.2)`.
fn needs(plan: &MemoryPlan) -> String {
    let part = |(name, bytes): (&str, u64)| format!("{name} {}", gibibytes(bytes).trim_end_matches(" GiB"));
    let parts: Vec<String> = plan.parts().into_iter().map(part).collect();
    format!("takes about {} ({})", gibibytes(plan.total()), parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Gpu;
    use querl_core::config::SftConfig;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Lines(Mutex<Vec<String>>);

    impl Progress for Lines {
        fn update(&self, _: u64, _: u64, _: &str) {}

        fn line(&self, text: &str) {
            self.0.lock().unwrap().push(text.into());
        }
    }

    /// Shapes of Qwen2.5-7B, as fine-tuned with rows of 1024 tokens.
    fn seven() -> MemoryRequest {
        let shapes = DecoderConfig::of_shape("qwen2.5-7b").unwrap();
        let model = serde_json::json!({"path": "model", "dtype": "bf16", "tokens_per_pass": 8192});
        let model = serde_json::from_value(model).unwrap();
        let stage = PlannedStage::Sft { config: SftConfig::default(), longest_row: 1024 };
        MemoryRequest { shapes, model, stage, types: DeviceSizes::GPU, n_devices: 1 }
    }

    fn gpu(free_gib: u64) -> UsedGpu {
        let gpu = Gpu { name: "a GPU".into(), memory_bytes: 80 << 30, capability: 90 };
        UsedGpu { index: 0, gpu, free_bytes: Some(free_gib << 30) }
    }

    #[test]
    fn a_shortage_names_the_setting_and_by_how_much() {
        let sentence = shortage(&gpu(40), &seven(), 40 << 30);
        let start = "sft takes about 43.4 GiB (activations 27.4, base 14.2, adapters 0.8, reserve 0.8, logits 0.2), and cuda:0 has \
                     40.0 GiB free: set model.tokens_per_pass to ";
        assert!(sentence.starts_with(start) && sentence.ends_with(" GiB less"), "{sentence}");
        let sentence = shortage(&gpu(4), &seven(), 4 << 30);
        assert!(sentence.ends_with(": no setting makes it fit; take a smaller model or a larger GPU"), "{sentence}");
    }

    #[test]
    fn a_base_that_cannot_fit_is_refused_and_activations_that_may_are_a_warning() {
        let check = |free_gib| {
            let lines = Lines::default();
            let done = super::check(Some(&gpu(free_gib)), &seven(), &lines);
            (done.map_err(|stop| stop.to_string()), lines.0.into_inner().unwrap())
        };
        let (refused, _) = check(14);
        assert!(refused.unwrap_err().contains(": set model.dtype to \""));
        let (refused, _) = check(4);
        assert!(refused.unwrap_err().ends_with("no setting makes it fit; take a smaller model or a larger GPU"));
        let (done, lines) = check(30);
        assert!(done.is_ok() && lines[0].starts_with("warning: sft takes about "), "{lines:?}");
        let (done, lines) = check(79);
        assert!(done.is_ok() && lines[0].starts_with("memory: takes about ") && lines[0].ends_with("of 79.0 GiB free"));
    }

    #[test]
    fn memory_that_ran_out_is_a_failure_with_what_to_change() {
        let of_job = |ending| JobError::from(Failure { kind: ending, message: "sft step 3: out of memory".into() });
        let said = |ending| explain(Some(&gpu(79)), &seven(), of_job(ending)).to_string();
        assert_eq!(said(FailureKind::Failed), "sft step 3: out of memory");
        let sentence = said(FailureKind::OutOfMemory);
        assert!(sentence.starts_with("sft step 3: out of memory; set model.tokens_per_pass to "), "{sentence}");
    }
}
