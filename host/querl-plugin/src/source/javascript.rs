//! Folders with a plugin in JavaScript: esbuild makes one module of the author's and the SDK's, componentize-js puts it and
//! SpiderMonkey into one component.
//!
//! The component imports WASI stdio, so that an exception's text and stack become the text of the fault, and the clocks, which are
//! always 0 in the host: without them the engine's clocks return the time of the build. Builds are not reproducible byte for byte,
//! since componentize-js 0.23 snapshots an engine with a random seed: pack the component that was tested.

use super::folder::Build;
use super::folder::{ScriptFolder, WORLD};
use crate::error::PluginError;
use querl_bundle::Kind;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The build script. Its first argument is a JSON request. It runs in the plugin's folder, so that Node.js resolves imports from there.
const SCRIPT: &str = include_str!("javascript_build.mjs");

/// npm packages that the build needs.
pub const PACKAGES: [&str; 2] = ["@bytecodealliance/componentize-js", "esbuild"];

/// A folder with plugin.toml and plugin.js.
pub(super) struct JavaScriptFolder {
    script: ScriptFolder,
}

impl JavaScriptFolder {
    pub(super) fn read(folder: &Path) -> Result<Self, PluginError> {
        let script = ScriptFolder::read(folder, "vendor/querl-sdk", "sdk/javascript")?;
        if !script.folder.join("plugin.js").is_file() {
            return Err(script.refused("the folder holds no plugin.js, the module that exports the plugin"));
        }
        Ok(Self { script })
    }

    /// The entry module, which binds the plugin's classes to the interfaces under the names that componentize-js expects.
    fn entry(&self) -> String {
        let path = |path: PathBuf| serde_json::Value::from(path.display().to_string());
        let sdk = |module: &str| path(self.script.sdk.join("guest").join(module));
        let (plugin, kinds) = (&self.script.manifest.plugin, self.script.kinds());
        let more = match self.script.is_of_0_1() {
            true => String::new(),
            false => format!(", {}", self.script.setting_docs()),
        };
        let mut text = format!(
            "import plugin from {};\nimport {{ checked, infoOf }} from {};\nchecked(plugin, {kinds:?});\n\
             export const info = infoOf(plugin, {:?}, {:?}{more});\n",
            path(self.script.folder.join("plugin.js")),
            sdk("info.js"),
            plugin.id,
            plugin.version.to_string(),
        );
        let json = self.script.has_json_rewards().then_some(("rewards.js", "jsonRewards"));
        for (module, export) in plugin.kinds.iter().map(|kind| interface(*kind)).chain(json) {
            let line =
                format!("import {{ {export}Of }} from {};\nexport const {export} = {export}Of(plugin);", sdk(module));
            writeln!(text, "{line}").expect("writing to a String succeeds");
        }
        if !self.script.is_of_0_1() {
            text += &self.host_functions();
        }
        text
    }

    /// Imports of the declared interfaces. The module of an interface exists only if the component imports it.
    fn host_functions(&self) -> String {
        let contract = &self.script.manifest.plugin.contract;
        let names = self.script.host_functions();
        let imports: String = (0..)
            .zip(&names)
            .map(|(n, name)| format!("import * as hostFunctions{n} from \"querl:plugin/{name}@{contract}\";\n"))
            .collect();
        let modules: Vec<_> = (0..).zip(&names).map(|(n, name)| format!("{name:?}: hostFunctions{n}")).collect();
        let connect = serde_json::Value::from(self.script.sdk.join("guest/host_functions.js").display().to_string());
        format!("{imports}import {{ connect }} from {connect};\nconnect({{ {} }});\n", modules.join(", "))
    }

    /// Checks that the packages are in the node_modules of this folder or of a parent folder, where Node.js also searches.
    fn check_packages(&self) -> Result<(), PluginError> {
        let is_there = |package: &str| {
            self.script.folder.ancestors().any(|folder| folder.join("node_modules").join(package).is_dir())
        };
        match PACKAGES.iter().find(|package| !is_there(package)) {
            Some(package) => {
                let place = self.folder_that_lists(package);
                let remedy = format!("run `npm install --ignore-scripts` in {place}");
                Err(self.script.refused(format!("building it needs {package}; {remedy}")))
            }
            None => Ok(()),
        }
    }

    /// The nearest folder whose package.json lists the package, because plugins may share packages that are installed in a parent folder.
    fn folder_that_lists(&self, package: &str) -> String {
        let lists = |folder: &&Path| {
            std::fs::read_to_string(folder.join("package.json"))
                .is_ok_and(|text| text.contains(&format!("\"{package}\"")))
        };
        let folder = &self.script.folder;
        match folder.ancestors().find(lists) {
            Some(above) if above != folder => above.display().to_string(),
            _ => "its folder".into(),
        }
    }
}

impl Build for JavaScriptFolder {
    fn component(&self) -> PathBuf {
        self.script.component()
    }

    fn is_fresh(&self) -> bool {
        self.script.is_fresh()
    }

    fn build(&self) -> Result<(), PluginError> {
        self.check_packages()?;
        self.script.put_component(|file| {
            let scratch = file.parent().unwrap_or(file);
            let wit = scratch.join("wit");
            self.script.write_wit(&wit)?;
            let request = serde_json::json!({
                "entry": self.entry(),
                "bundle": self.component().with_extension("js"),
                "component": file,
                "wit": wit,
                "world": WORLD,
            });
            let mut node = self.script.command("node");
            node.args(["--input-type=module", "--eval", SCRIPT, "--"]).arg(request.to_string());
            let missing = "building it needs Node.js 20 or later; install it, then run `npm install --ignore-scripts` in its folder";
            self.script.run("componentize-js", node, missing, |_| String::new())
        })
    }
}

/// The SDK's module for a kind, and the name of its export.
fn interface(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Prompt => ("prompts.js", "prompts"),
        Kind::Filter => ("filters.js", "filters"),
        Kind::Reward => ("rewards.js", "rewards"),
        Kind::GroupReward => ("rewards.js", "groupRewards"),
        Kind::StyleScorer => ("style_scores.js", "styleScores"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::folder::tests::folder_with;

    #[test]
    fn entry_binds_the_kinds_of_the_manifest_under_its_name_and_version() {
        let folder = folder_with("vendor/querl-sdk", &["plugin.js"]);
        let entry = JavaScriptFolder::read(folder.path()).unwrap().entry();
        assert!(entry.contains("checked(plugin, [\"filter\"]);"), "{entry}");
        assert!(entry.contains("export const info = infoOf(plugin, \"short\", \"0.1.0\");"), "{entry}");
        assert!(entry.ends_with("export const filters = filtersOf(plugin);\n"), "{entry}");
    }

    #[test]
    fn entry_of_0_2_has_json_host_functions_and_documentation() {
        let folder = folder_with("vendor/querl-sdk", &["plugin.js"]);
        let manifest = "[plugin]\nid = 'short'\nversion = '0.1.0'\ncontract = '0.2.0'\nkinds = ['group-reward']\ndescription = 'x'\n\
                        license = 'MIT'\nrange = [0, 1]\nhost_functions = ['words']\n[settings.n]\ntype = 'number'\ndoc = 'How long.'\n";
        std::fs::write(folder.path().join("plugin.toml"), manifest).unwrap();
        let entry = JavaScriptFolder::read(folder.path()).unwrap().entry();
        for expected in [
            "export const info = infoOf(plugin, \"short\", \"0.1.0\", {\"n\":\"How long.\"});",
            "export const groupRewards = groupRewardsOf(plugin);",
            "export const jsonRewards = jsonRewardsOf(plugin);",
            "import * as hostFunctions0 from \"querl:plugin/words@0.2.0\";",
            "connect({ \"words\": hostFunctions0 });",
        ] {
            assert!(entry.contains(expected), "{entry}");
        }
    }

    #[test]
    fn missing_package_is_one_sentence_with_the_command() {
        let folder = folder_with("vendor/querl-sdk", &["plugin.js"]);
        let plugin = JavaScriptFolder::read(folder.path()).unwrap();
        let missing = || plugin.check_packages().unwrap_err().to_string();
        assert!(
            missing()
                .ends_with("needs @bytecodealliance/componentize-js; run `npm install --ignore-scripts` in its folder"),
            "{}",
            missing()
        );
        std::fs::create_dir_all(plugin.script.folder.join("node_modules/@bytecodealliance/componentize-js")).unwrap();
        assert!(
            missing().ends_with("needs esbuild; run `npm install --ignore-scripts` in its folder"),
            "{}",
            missing()
        );
    }
}
