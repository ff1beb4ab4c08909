//! A small project for the binary: forty queries of the example, a random model of a few thousand weights, the repository's
//! plugins.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // each test program uses a part

pub mod process;
pub mod results;
pub mod server;
pub mod tenants;

use querl_model::{Decoder, DecoderConfig, TokenizerSettings, train_tokenizer};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A folder with `querl.toml`, `queries.jsonl` and `teacher.jsonl`. Only plugins and knowledge base are outside of it.
pub struct Project {
    pub folder: tempfile::TempDir,
}

impl Project {
    pub fn new() -> Self {
        LazyLock::force(&BUILT_PLUGINS);
        let folder = tempfile::tempdir().unwrap();
        let project = Self { folder };
        let recording =
            std::fs::read_to_string(repository().join("examples/fivedoctors/teacher_rewrites.jsonl")).unwrap();
        let rows: Vec<&str> = recording.lines().take(40).collect();
        project.write("queries.jsonl", &rows.join("\n"));
        project.write("teacher.jsonl", &rows.join("\n"));
        project.write("querl.toml", &config());
        project
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    /// Replaces a text that the configuration must contain.
    pub fn edit(&self, from: &str, to: &str) -> &Self {
        let text = self.read("querl.toml");
        assert!(text.contains(from), "{from}");
        self.write("querl.toml", &text.replacen(from, to, 1));
        self
    }

    pub fn add_fallback_teacher(&self, url: &str) {
        let section =
            format!("[fallback_teacher]\nbase_url = \"{url}/v1\"\nmodel = \"spare\"\napi_key_env = \"\"\n[judge]");
        self.edit("[judge]", &section);
    }

    /// Runs the binary in the project's folder.
    pub fn querl(&self, args: &[&str]) -> CommandOutput {
        CommandOutput::of(self.command(args).output().unwrap(), self.folder.path())
    }

    /// Runs the binary quietly and asserts its exit code and an empty stdout. Returns the only line on stderr, without `error: `.
    pub fn refusal(&self, args: &[&str], code: i32) -> String {
        let output = self.querl(&[args, &["-q"]].concat());
        assert_eq!((output.code, output.stderr.lines().count()), (Some(code), 1), "{output:#?}");
        assert_eq!(output.stdout, "", "{output:#?}");
        output.stderr.trim_end().strip_prefix("error: ").unwrap().to_owned()
    }

    pub fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.querl(&[args, &["--json"]].concat()).ok().stdout).unwrap()
    }

    /// The records of a JSON Lines file.
    pub fn rows(&self, file: &str) -> Vec<Value> {
        self.read(file).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Copies the tiny model to `folder`, so that a test can change it.
    pub fn copy_model(&self, folder: &str) {
        results::copy(&MODEL, &self.path(folder));
    }

    /// Runs the binary from bash, after commands such as `ulimit -v 1000`.
    pub fn querl_after(&self, commands: &str, args: &[&str]) -> CommandOutput {
        let (alone, mut shell) = (self.command(args), Command::new("bash"));
        shell.args(["-c", &format!("set -e; {commands}; exec \"$0\" \"$@\"")]).arg(alone.get_program()).args(args);
        for (name, value) in alone.get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        CommandOutput::of(shell.current_dir(self.folder.path()).output().unwrap(), self.folder.path())
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_querl"));
        command.args(args).current_dir(self.folder.path()).env_remove("QUERL_LOG").env_remove("OPENAI_API_KEY");
        command.env("QUERL_CACHE_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
        // Hides the GPUs of this machine.
        command
            .env("QUERL_CUDA_DRIVER", "no-such-driver")
            .env_remove("QUERL_CUDA_LIBRARY")
            .env_remove("QUERL_CUDA_ON_CPU");
        command
    }
}

/// Output of the binary; the project's folder is removed from paths.
#[derive(Debug)]
pub struct CommandOutput {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl CommandOutput {
    pub fn of(output: Output, folder: &Path) -> Self {
        let text = |bytes: Vec<u8>| {
            let real = format!("{}/", folder.canonicalize().unwrap().display());
            String::from_utf8(bytes).unwrap().replace(&real, "").replace(&format!("{}/", folder.display()), "")
        };
        Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Asserts an exit code of 0.
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self
    }

    /// Asserts an exit code of 2 and that stderr contains `expected`.
    pub fn refused(self, expected: &str) -> Self {
        assert!(self.code == Some(2) && self.stderr.contains(expected), "no {expected:?}: {self:#?}");
        self
    }
}

/// Arguments, with `--set` before each of `sets`.
pub fn with_sets<'a>(args: &[&'a str], sets: &[&'a str]) -> Vec<&'a str> {
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    args.iter().copied().chain(sets).collect()
}

/// The `querl.toml` of this folder, which tests/attack also uses, with its paths replaced.
fn config() -> String {
    let paths = [
        ("{example}", repository().join("examples/fivedoctors")),
        ("{plugins}", repository().join("plugins")),
        ("{model}", MODEL.clone()),
    ];
    let template = include_str!("querl.toml").to_owned();
    paths.iter().fold(template, |text, (name, path)| text.replace(name, &path.display().to_string()))
}

/// Builds the plugins of the configurations once, because commands that only check them do not.
static BUILT_PLUGINS: LazyLock<()> = LazyLock::new(|| {
    let names = ["tenant-fivedoctors", "filter-quality", "reward-competition", "prompt-answer", "scorer-style"];
    for name in names {
        querl_plugin::build(&repository().join("plugins").join(name)).unwrap();
    }
});

/// Created once and kept with other build outputs: a Qwen3 of two layers with random weights and a tokenizer of the example's words.
static MODEL: LazyLock<PathBuf> = LazyLock::new(|| {
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("random-qwen3");
    if !kept.exists() {
        let new = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        make_model(new.path());
        // If another test program created it first, that one is used.
        let _ = std::fs::rename(new.keep(), &kept);
    }
    kept
});

fn make_model(folder: &Path) {
    let text = std::fs::read_to_string(repository().join("examples/fivedoctors/knowledge_base.jsonl")).unwrap();
    let settings =
        TokenizerSettings { vocab_size: 800, special_tokens: &["<|endoftext|>", "<|im_start|>", "<|im_end|>"] };
    let texts: Vec<String> = text.lines().map(str::to_owned).collect();
    let tokenizer = train_tokenizer(&texts, &settings, &folder.join("tokenizer.json")).unwrap();
    let config = serde_json::json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true,
        "vocab_size": tokenizer.get_vocab_size(true), "hidden_act": "silu", "attention_bias": false,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let special = serde_json::json!({ "eos_token": "<|im_end|>", "chat_template": TEMPLATE });
    std::fs::write(folder.join("tokenizer_config.json"), special.to_string()).unwrap();
    let decoder = Decoder::init(DecoderConfig::load(&folder.join("config.json")).unwrap(), 1).unwrap();
    decoder.save(folder, candle_core::DType::F32).unwrap();
}

/// The model's folder, to copy from.
pub fn model() -> &'static Path {
    &MODEL
}
