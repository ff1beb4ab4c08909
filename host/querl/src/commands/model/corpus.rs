//! `querl model corpus`: writes the pretraining corpus of a small model from a tenant's knowledge base, and a file for `model pretrain`.

use crate::args::{Format, load_config, usage};
use crate::model_hub;
use crate::terminal::Terminal;
use anyhow::Context;
use clap::Args;
use querl_core::config::{Config, MissingModel, Overrides};
use querl_core::fsx::write_atomic;
use querl_core::text::grouped;
use querl_pipeline::corpus::{CorpusSettings, CorpusSummary, Recipe, write_corpus};
use querl_pipeline::failure::Stop;
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(crate) struct CorpusArgs {
    /// The configuration: its knowledge base and prompt plugin are used, its query table is not
    #[arg(value_name = "CONFIG")]
    config: PathBuf,
    /// Replace a key of the configuration, such as rl.max_steps=5: a TOML value; a bare word is a string
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Where to write the corpus, as JSON lines
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Lines of the corpus [default: 48000, or 12 for each text of the knowledge base where that is more]
    #[arg(long, value_name = "N")]
    lines: Option<usize>,
    /// Seed of the sampling of lines; also that of the pretraining
    #[arg(long, value_name = "N", default_value_t = 42)]
    seed: u32,
    /// Also write a file for `querl model pretrain`, with vocabulary and shape by the size of the texts
    #[arg(long, value_name = "FILE", requires = "out_model")]
    pretrain: Option<PathBuf>,
    /// The folder of the new model, which that file names
    #[arg(long = "out_model", visible_alias = "out-model", value_name = "DIR", requires = "pretrain")]
    out_model: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

pub(super) fn run(args: &CorpusArgs) -> anyhow::Result<()> {
    let overrides = Overrides {
        set: args.set.clone(),
        model_hub: Some(model_hub::find_cached),
        without_keys: true,
        missing_model: MissingModel::Small,
        ..Overrides::default()
    };
    let config = load_config(&args.config, overrides)?;
    check_outputs(args, &config)?;
    let pretrain = args.pretrain.as_deref().zip(args.out_model.as_deref());
    let paths = pretrain.map(|(file, model)| recipe_paths(file, &args.out, model)).transpose()?;
    let settings = CorpusSettings { n_lines: args.lines, seed: u64::from(args.seed) };
    let summary = write_corpus(&config, &args.out, &settings, &Terminal)?;
    let n_lines = summary.n_texts + summary.n_conversations;
    let recipe = Recipe::of(summary.text_bytes, summary.longest_line_bytes, n_lines);
    if let (Some((file, _)), Some((corpus, model))) = (pretrain, &paths) {
        let text = recipe.to_toml(corpus, model, settings.seed);
        write_atomic(file, text.as_bytes()).with_context(|| format!("{}: cannot be written", file.display()))?;
    }
    let recipe = args.pretrain.as_deref().zip(Some(&recipe));
    let result = json!({
        "corpus": args.out, "lines": n_lines, "summary": summary, "pretrain": args.pretrain,
        "recipe": recipe.map(|(_, recipe)| recipe),
    });
    args.format.print(&result, || lines(&args.out, &summary, recipe))
}

/// Refuses an output that is a folder, or that would replace an input or the other output.
fn check_outputs(args: &CorpusArgs, config: &Config) -> Result<(), Stop> {
    // Symbolic links are resolved if the file exists.
    let place =
        |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.into());
    let retrieval = &config.retrieval;
    let optional = [
        &retrieval.knowledge_base,
        &retrieval.lexicon,
        &retrieval.user_dictionary,
        &retrieval.synonyms,
        &config.data.input,
        &config.data.dataset.train,
        &config.data.dataset.val,
        &config.data.dataset.test,
    ];
    let mut inputs: Vec<&Path> = optional.into_iter().filter_map(|path| path.as_deref()).collect();
    inputs.extend([args.config.as_path(), config.plugins.prompt.path.as_path()]);
    let outputs = [Some(("--out", args.out.as_path())), args.pretrain.as_deref().map(|path| ("--pretrain", path))];
    for (flag, path) in outputs.into_iter().flatten() {
        if path.is_dir() {
            return Err(usage(format!("{flag} {}: is a folder; name a file in it", path.display())));
        }
        if inputs.iter().any(|input| place(input) == place(path)) {
            let path = path.display();
            return Err(usage(format!("{flag} {path}: is an input and would be replaced; name another file")));
        }
    }
    match args.pretrain.as_deref().filter(|pretrain| place(pretrain) == place(&args.out)) {
        Some(path) => {
            Err(usage(format!("--pretrain {}: is the file of --out, too; name another file", path.display())))
        }
        None => Ok(()),
    }
}

fn lines(corpus: &Path, summary: &CorpusSummary, recipe: Option<(&Path, &Recipe)>) -> String {
    let CorpusSummary { language, n_passages, n_texts, n_conversations, text_bytes, .. } = summary;
    let language = format!("{language:?}").to_lowercase();
    let bytes = grouped(*text_bytes as u64);
    let mut text = format!(
        "corpus    {}\nlines     {}: {n_texts} of text, {n_conversations} conversations\n\
         passages  {n_passages}, {bytes} bytes, language {language}\n",
        corpus.display(),
        n_texts + n_conversations,
    );
    if let Some((file, recipe)) = recipe {
        let Recipe { vocab_size, hidden_size, n_layers, learning_rate, n_steps, .. } = recipe;
        text.push_str(&format!(
            "model     vocabulary {vocab_size}, width {hidden_size}, {n_layers} layers; learning rate {learning_rate}, about {n_steps} steps\n\
             next      querl model pretrain {}\n",
            file.display()
        ));
    }
    text
}

/// Paths of corpus and model in the file for `pretrain`: relative to its folder if they are below it, else absolute.
fn recipe_paths(file: &Path, corpus: &Path, model: &Path) -> anyhow::Result<(String, String)> {
    let absolute = |path: &Path| {
        std::path::absolute(path)
            .map_err(|error| usage(format!("{}: cannot be used as a path: {error}", path.display())))
    };
    let file = absolute(file)?;
    let folder = file.parent().unwrap_or(Path::new("/"));
    let named = |path: &Path| -> Result<String, Stop> {
        let path = absolute(path)?;
        let shown = path.strip_prefix(folder).ok().filter(|rest| !rest.as_os_str().is_empty()).unwrap_or(&path);
        let text = shown.to_str().map(str::to_owned);
        text.ok_or_else(|| usage(format!("{}: the path is not UTF-8 text; rename the file or folder", path.display())))
    };
    Ok((named(corpus)?, named(model)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_below_the_folder_of_the_file_are_relative() {
        let of = |file: &str, corpus: &str, model: &str| {
            recipe_paths(Path::new(file), Path::new(corpus), Path::new(model)).unwrap()
        };
        let expected = ("corpus.jsonl".to_owned(), "models/small".to_owned());
        assert_eq!(of("/a/pretrain.toml", "/a/corpus.jsonl", "/a/models/small"), expected);
        assert_eq!(of("pretrain.toml", "./corpus.jsonl", "models/small"), expected);
        assert_eq!(of("/a/pretrain.toml", "/b/corpus.jsonl", "/a").0, "/b/corpus.jsonl");
        assert_eq!(of("/a/pretrain.toml", "/b/corpus.jsonl", "/a").1, "/a");
    }
}
