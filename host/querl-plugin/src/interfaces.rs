//! What a component asks for and offers, by name: for people who look at a plugin before they run it.

use crate::load::Plugin;

impl Plugin {
    /// The interfaces that it imports: `querl:plugin/log@0.1.0`, `wasi:clocks/monotonic-clock@0.2.6`.
    pub fn imports(&self) -> Vec<String> {
        let pre = &self.parts.linked.exports.pre;
        pre.component().component_type().imports(pre.engine()).map(|(name, _)| name.to_owned()).collect()
    }

    /// The interfaces that it exports: `querl:plugin/info@0.1.0`, `querl:plugin/rewards@0.1.0`.
    pub fn exports(&self) -> Vec<String> {
        let pre = &self.parts.linked.exports.pre;
        pre.component().component_type().exports(pre.engine()).map(|(name, _)| name.to_owned()).collect()
    }
}
