//! Types and calls of contract 0.2, generated from `wit/0.2.0`.
#![allow(missing_docs, unreachable_pub, unused_variables, clippy::all, reason = "generated")]

wasmtime::component::bindgen!({
    // As of contract 0.1: one world over all kinds.
    inline: "
        package querl:host;
        world every-kind {
            import querl:plugin/tokens@0.2.0;
            import querl:plugin/judge@0.2.0;
            import querl:plugin/style-model@0.2.0;
            export querl:plugin/info@0.2.0;
            export querl:plugin/prompts@0.2.0;
            export querl:plugin/filters@0.2.0;
            export querl:plugin/rewards@0.2.0;
            export querl:plugin/group-rewards@0.2.0;
            export querl:plugin/packed-rewards@0.2.0;
            export querl:plugin/json-rewards@0.2.0;
            export querl:plugin/style-scores@0.2.0;
        }
    ",
    path: "../../wit/0.2.0",
    world: "querl:host/every-kind",
    ownership: Borrowing { duplicate_if_necessary: true },
});

pub use exports::querl::plugin::{
    filters, group_rewards, info, json_rewards, packed_rewards, prompts, rewards, style_scores,
};
pub use querl::plugin::{calls::CallError, types};
