//! Which tensors a decoder of a given config has.

use crate::DecoderConfig;

impl DecoderConfig {
    /// Every adapted-by-default linear layer: its path, outputs, inputs.
    pub(crate) fn linear_layers(&self) -> impl Iterator<Item = (String, usize, usize)> {
        let (h, f) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        let shapes = [
            ("self_attn.q_proj", q, h),
            ("self_attn.k_proj", kv, h),
            ("self_attn.v_proj", kv, h),
            ("self_attn.o_proj", h, q),
            ("mlp.gate_proj", f, h),
            ("mlp.up_proj", f, h),
            ("mlp.down_proj", h, f),
        ];
        (0..self.n_layers).flat_map(move |layer| {
            shapes.map(|(name, n_out, n_in)| (format!("model.layers.{layer}.{name}"), n_out, n_in))
        })
    }

    /// Weights in all, a tied head counted once.
    pub fn n_parameters(&self) -> usize {
        self.tensor_shapes().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Every tensor of a checkpoint with its shape.
    pub(crate) fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let h = self.hidden_size;
        let mut shapes = vec![
            ("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, h]),
            ("model.norm.weight".to_owned(), vec![h]),
        ];
        if !self.tie_word_embeddings {
            shapes.push(("lm_head.weight".to_owned(), vec![self.vocab_size, h]));
        }
        for (path, n_out, n_in) in self.linear_layers() {
            let has_bias = match path.rsplit('.').next() {
                Some("q_proj" | "k_proj" | "v_proj") => self.qkv_bias,
                Some("o_proj") => self.output_bias,
                _ => false,
            };
            if has_bias {
                shapes.push((format!("{path}.bias"), vec![n_out]));
            }
            shapes.push((format!("{path}.weight"), vec![n_out, n_in]));
        }
        for layer in 0..self.n_layers {
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                shapes.push((format!("model.layers.{layer}.{norm}.weight"), vec![h]));
            }
            if self.family.has_qk_norm() {
                for norm in ["q_norm", "k_norm"] {
                    shapes.push((format!("model.layers.{layer}.self_attn.{norm}.weight"), vec![self.head_dim]));
                }
            }
        }
        shapes
    }
}
