//! The memory plan compared with the peak memory of a fine-tuning on the CPU.
#![allow(clippy::unwrap_used)]

use querl_core::config::{ModelConfig, SftConfig};
use querl_core::ports::Silent;
use querl_model::{DType, Decoder, DecoderConfig};
use querl_train::Example;
use querl_train::job::memory_plan::{DeviceSizes, MemoryPlan, MemoryRequest, PlannedStage};
use querl_train::job::{Callbacks, Device, NoMetrics, Resources, SftJob, run_sft};
use serde_json::json;
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// An allocator that counts the current and the peak number of allocated bytes.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is forwarded to the system's allocator; the counters do not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promise is that of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is that of the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const VOCAB_SIZE: u32 = 96;
const N_ROWS: usize = 24;
const ROW: usize = 100;

fn make_model(folder: &Path) -> DecoderConfig {
    let config = serde_json::json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 96, "intermediate_size": 256,
        "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true,
        "vocab_size": VOCAB_SIZE, "hidden_act": "silu", "attention_bias": false,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let shapes = DecoderConfig::load(&folder.join("config.json")).unwrap();
    Decoder::init(shapes.clone(), 1).unwrap().save(folder, DType::F32).unwrap();
    shapes
}

/// Rows without common prefixes, half prompt and half response.
fn examples() -> Vec<Example> {
    let token = |row: usize, at: usize| ((row * 31 + at * 7 + at * at * row) as u32) % VOCAB_SIZE;
    let row = |row| {
        let mut tokens: Vec<u32> = (0..ROW).map(|at| token(row, at)).collect();
        tokens[0] = row as u32;
        Example { response: tokens.split_off(ROW / 2), prompt: tokens }
    };
    (0..N_ROWS).map(row).collect()
}

fn peak_and_plan(folder: &Path, shapes: &DecoderConfig, gradient_checkpointing: bool) -> (f64, MemoryPlan) {
    let config = SftConfig {
        batch_size: N_ROWS,
        gradient_accumulation_steps: 1,
        max_steps: 2,
        epochs: 2,
        lora_rank: 8,
        ..SftConfig::default()
    };
    let model = json!({"path": folder, "tokens_per_pass": 4096, "gradient_checkpointing": gradient_checkpointing});
    let model: ModelConfig = serde_json::from_value(model).unwrap();
    let stage = PlannedStage::Sft { config: config.clone(), longest_row: ROW };
    let plan = MemoryPlan::new(&MemoryRequest {
        shapes: shapes.clone(),
        model: model.clone(),
        stage,
        types: DeviceSizes::CPU,
        n_devices: 1,
    });
    let output = tempfile::tempdir().unwrap();
    let (train, output_dir) = (examples(), output.path().to_owned());
    let job = SftJob { model, seed: 1, config, train, val: Vec::new(), fingerprint: None, output_dir };
    let resources = Resources { devices: vec![Device::Cpu], threads: 2 };
    let (metrics, stop) = (Mutex::new(NoMetrics), AtomicBool::new(false));
    let callbacks = Callbacks { progress: &Silent, metrics: &metrics, stop: &stop };
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    run_sft(&job, &resources, &callbacks).unwrap();
    ((PEAK.load(Ordering::Relaxed) - before) as f64, plan)
}

/// The bounds include buffers and threads of the CPU kernels, but would detect a part that is missing or counted twice.
#[test]
fn a_plan_is_near_what_a_fine_tuning_allocates() {
    let folder = tempfile::tempdir().unwrap();
    let shapes = make_model(folder.path());
    let (whole, planned_whole) = peak_and_plan(folder.path(), &shapes, false);
    let (checkpointed, planned_checkpointed) = peak_and_plan(folder.path(), &shapes, true);
    for (counted, plan) in [(whole, planned_whole), (checkpointed, planned_checkpointed)] {
        let share = counted / plan.total() as f64;
        println!("counted {:.1} MiB, planned {:.1}: {share:.3}", counted / 1048576.0, plan.total() as f64 / 1048576.0);
        println!("{plan:?}");
        assert!((0.8..1.1).contains(&share), "counted {counted}, planned {plan:?}");
    }
    let (saved, planned) = (whole - checkpointed, (planned_whole.total() - planned_checkpointed.total()) as f64);
    assert!((0.85..1.15).contains(&(saved / planned)), "checkpointing saved {saved}, planned {planned}");
}
