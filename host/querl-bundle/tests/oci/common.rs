//! A plugin that does nothing, packed.
#![allow(dead_code, unreachable_pub)]

use querl_bundle::oci::RegistryReference;

/// What goes into a bundle.
pub struct TestPlugin {
    pub version: String,
    pub readme: String,
    pub component: Vec<u8>,
}

impl Default for TestPlugin {
    fn default() -> Self {
        let text = r#"(component (instance $rewards) (export "querl:plugin/rewards@0.1.0" (instance $rewards)))"#;
        Self { version: "0.1.0".into(), readme: "# 简短奖励\n".into(), component: wat::parse_str(text).unwrap() }
    }
}

/// The bundle of `plugin`.
pub fn bundle(plugin: &TestPlugin) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let manifest = format!(
        "[plugin]\nid = \"reward-brevity\"\nversion = \"{}\"\ncontract = \"0.1.0\"\nkinds = [\"reward\"]\n\
         description = \"短的改写得分高\"\nlicense = \"Apache-2.0\"\nrange = [0.0, 1.0]\n",
        plugin.version
    );
    for (name, text) in [("plugin.toml", &manifest), ("README.md", &plugin.readme), ("LICENSE", &"Apache\n".to_owned())]
    {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    querl_bundle::pack(folder.path(), &plugin.component).unwrap()
}

/// `HOST/REPOSITORY` without a version.
pub fn location(host: &str, repository: &str) -> RegistryReference {
    RegistryReference::parse(&format!("{host}/{repository}")).unwrap()
}
