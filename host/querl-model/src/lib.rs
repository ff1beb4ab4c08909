//! Qwen2 and Qwen3 decoders, LoRA, generation and checkpoints
