//! Types and calls of contract 0.1, generated from `wit/0.1.0`.
#![allow(missing_docs, unreachable_pub, unused_variables, clippy::all, reason = "generated")]

wasmtime::component::bindgen!({
    // One world for all kinds, so that they share their types; interfaces are looked up separately (see `load`).
    inline: "
        package querl:host;
        world every-kind {
            import querl:plugin/style-model@0.1.0;
            export querl:plugin/info@0.1.0;
            export querl:plugin/prompts@0.1.0;
            export querl:plugin/filters@0.1.0;
            export querl:plugin/rewards@0.1.0;
            export querl:plugin/packed-rewards@0.1.0;
            export querl:plugin/style-scores@0.1.0;
        }
    ",
    path: "../../wit/0.1.0",
    world: "querl:host/every-kind",
    // Arguments are lowered directly from the records, without an intermediate copy of the texts.
    ownership: Borrowing { duplicate_if_necessary: true },
});

pub use exports::querl::plugin::{filters, info, packed_rewards, prompts, rewards, style_scores};
pub use querl::plugin::{style_model::ClassifyError as CallError, types};
