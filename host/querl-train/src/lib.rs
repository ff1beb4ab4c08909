//! Supervised fine-tuning and PPO
