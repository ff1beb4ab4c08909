//! A small model for one tenant: `querl model corpus`, and `querl model pretrain` with held-out lines.
#![allow(clippy::unwrap_used)]

mod support;

use querl_core::dir_lock::DirLock;
use serde_json::Value;
use support::Project;

const KNOWLEDGE_BASE: &str = r#"{"id": "a", "title": "AquaLine 60: cleaning the filter", "text": "Residue on crockery indicates a saturated triple filter. Rinse all stages under running water."}
{"id": "b", "title": "AquaLine 60: fault code E15", "text": "The anti-flood float detects water in the base pan. Close the tap and drain the pan."}
{"id": "c", "title": "BreezeMax 9: replacing the cartridge", "text": "The carbon cartridge lasts about six months. Order the spare part from any dealer."}
{"id": "d", "title": "BreezeMax 9: noise at night", "text": "A humming compressor is normal below forty decibels. Level the feet of the housing."}
"#;

/// A project with an English knowledge base, whose query table cannot be read and whose model does not exist yet.
fn project() -> Project {
    let project = Project::new();
    project.write("kb.jsonl", KNOWLEDGE_BASE);
    project.write("queries.jsonl", "no table");
    project
}

const SETTINGS: [&str; 4] = ["--set", "retrieval.knowledge_base=kb.jsonl", "--set", "model.path=own-model"];

fn corpus(project: &Project, args: &[&str]) -> Vec<Value> {
    project.querl(&[&["model", "corpus", "querl.toml", "--out", "corpus.jsonl"], &SETTINGS[..], args].concat()).ok();
    project.rows("corpus.jsonl")
}

fn answers(lines: &[Value]) -> Vec<&str> {
    let messages = lines.iter().filter_map(|line| line["messages"].as_array());
    messages.map(|messages| messages.last().unwrap()["content"].as_str().unwrap()).collect()
}

#[test]
fn a_corpus_has_every_passage_and_conversations_and_reads_no_query() {
    let project = project();
    let lines = corpus(&project, &["--lines", "60"]);
    assert_eq!(lines.len(), 60);
    let texts: Vec<&str> = lines.iter().filter_map(|line| line["text"].as_str()).collect();
    // 60 lines over 4 passages: at most a third of the lines are texts of passages.
    assert_eq!(texts.len(), 16);
    assert!(texts.iter().any(|text| text.starts_with("BreezeMax 9: noise at night\nA humming")), "{texts:?}");
    let answers = answers(&lines);
    assert_eq!(answers.len(), 44);
    // About half of the entities are invented.
    let is_real = |answer: &&&str| answer.starts_with("AquaLine 60") || answer.starts_with("BreezeMax 9");
    let n_real = answers.iter().filter(is_real).count();
    assert!((12..38).contains(&n_real), "{n_real} of {}", answers.len());
    let conversation = lines.iter().find(|line| line["messages"].is_array()).unwrap();
    assert_eq!(conversation["messages"].as_array().unwrap().last().unwrap()["role"], "assistant");

    let first = project.read("corpus.jsonl");
    corpus(&project, &["--lines", "60"]);
    assert_eq!(project.read("corpus.jsonl"), first);
    corpus(&project, &["--lines", "60", "--seed", "7"]);
    assert_ne!(project.read("corpus.jsonl"), first);
    assert!(!project.path("run").exists() && !project.path("own-model").exists());
}

#[test]
fn with_edits_half_of_the_answers_add_to_the_query() {
    let project = project();
    let lines = corpus(&project, &["--lines", "200", "--set", "data.rewrite_form=edit"]);
    let answers = answers(&lines);
    let n_edits = answers.iter().filter(|answer| answer.starts_with(['+', '&']) || **answer == "=").count();
    assert!((answers.len() / 3..answers.len() * 2 / 3).contains(&n_edits), "{n_edits} of {}", answers.len());
    assert!(answers.iter().any(|answer| answer.starts_with('&')), "{answers:?}");
}

#[test]
fn the_written_file_pretrains_a_model_with_held_out_lines() {
    let project = project();
    let args = ["model", "corpus", "querl.toml", "--out", "corpus.jsonl", "--lines", "60"];
    let recipe = ["--pretrain", "pretrain.toml", "--out_model", "own-model"];
    let written = project.json(&[&args[..], &SETTINGS, &recipe].concat());
    assert_eq!((&written["recipe"]["vocab_size"], &written["summary"]["language"]), (&2400.into(), &"en".into()));
    let text = project.read("pretrain.toml");
    assert!(text.contains("corpus = \"corpus.jsonl\"\noutput_dir = \"own-model\"\n"), "{text}");
    project.write("pretrain.toml", &text.replace("epochs = 2\n", "epochs = 1\nmax_steps = 1\n"));
    let lock = DirLock::take(&project.path("own-model")).unwrap();
    let in_use = project.refusal(&["model", "pretrain", "pretrain.toml"], 1);
    let expected = format!("own-model is in use by another querl (process {})", std::process::id());
    assert!(in_use.contains(&expected) && in_use.ends_with("; wait for it, or name another output_dir"), "{in_use}");
    assert!(!project.path("own-model/.pretrain").exists());
    drop(lock);
    // Regression: a model whose pretraining was stopped was reported as damaged.
    std::fs::create_dir_all(project.path("own-model/.pretrain/state")).unwrap();
    for command in [&["config", "check", "querl.toml"][..], &["plan", "querl.toml"]] {
        let said =
            project.querl(&[command, &["--set", "model.path=own-model", "--set", "data.input=teacher.jsonl"]].concat());
        said.refused("own-model: its pretraining is not finished; run `querl model pretrain` with");
    }
    // Regression: so did `plan --no_model`, which needs no model.
    project
        .querl(&[
            "plan",
            "querl.toml",
            "--no_model",
            "--set",
            "model.path=own-model",
            "--set",
            "data.input=teacher.jsonl",
        ])
        .ok();
    std::fs::remove_dir_all(project.path("own-model/.pretrain")).unwrap();
    let made = project.querl(&["model", "pretrain", "pretrain.toml"]).ok();
    assert!(made.stderr.contains(" 60 examples, ") && made.stderr.contains(" held out\n"), "{made:#?}");
    assert!(made.stderr.contains(", held-out loss ") && made.stderr.contains(" at step 1, whose"), "{made:#?}");
    let unfinished =
        "the last step has the best held-out loss; more steps (max_steps = 2 and enough epochs in pretrain.toml)";
    assert!(made.stderr.contains(unfinished), "{made:#?}");
    let model = project.json(&["model", "inspect", "own-model"]);
    assert_eq!((&model["layers"], &model["hidden_size"]), (&4.into(), &192.into()));
    assert!(!project.path("own-model/.pretrain").exists());
}

#[test]
fn the_weights_with_the_best_held_out_loss_are_written() {
    let project = Project::new();
    let lines: String = (0..40).map(|n| format!("{{\"text\": \"五博士鱼油 第{n}批 每天两粒 饭后服用\"}}\n")).collect();
    project.write("corpus.jsonl", &lines);
    // With a high, constant learning rate the loss soon stops decreasing, and the best step does not depend on `max_steps`.
    let pretrain = |folder: &str, max_steps: &str| {
        let text = format!(
            "corpus = \"corpus.jsonl\"\noutput_dir = \"{folder}\"\nseed = 1\nvocab_size = 300\nval_share = 0.2\n\
             [model]\nhidden_size = 16\nintermediate_size = 16\nn_layers = 1\nn_heads = 1\nn_kv_heads = 1\nhead_dim = 16\nmax_positions = 64\n\
             [train]\nmethod = \"full\"\nlearning_rate = 0.05\nlr_scheduler = \"constant\"\nwarmup_ratio = 0.0\nepochs = 200\neval_steps = 0\n\
             early_stopping_patience = 2\nmax_steps = {max_steps}\n"
        );
        project.write("pretrain.toml", &text);
        project.querl(&["model", "pretrain", "pretrain.toml"]).ok().stderr
    };
    let said = pretrain("long", "0");
    assert!(said.contains(" 40 examples, 8 held out\n"), "{said}");
    let number = |before: &str, after: &str| -> u64 {
        let (_, rest) = said.rsplit_once(before).unwrap();
        rest.split_once(after).unwrap().0.parse().unwrap()
    };
    let (n_steps, best) = (said.rsplit_once(" steps, final loss ").unwrap().0, number(" at step ", ", whose"));
    let n_steps: u64 = n_steps.rsplit('\n').next().unwrap().parse().unwrap();
    assert!(best < n_steps && n_steps < 400, "stopped early after {n_steps} steps, best {best}");
    pretrain("short", &best.to_string());
    let weights = |folder: &str| std::fs::read(project.path(&format!("{folder}/model.safetensors"))).unwrap();
    assert!(weights("long") == weights("short"));
}

#[test]
fn what_cannot_be_used_is_refused_with_what_was_expected() {
    let project = project();
    let refused = |args: &[&str]| {
        project.refusal(&[&["model", "corpus", "querl.toml", "--out", "corpus.jsonl"], &SETTINGS[..], args].concat(), 2)
    };
    let expected =
        "--lines is 7; expected at least 8: each of 4 texts of the knowledge base, and as many conversations";
    assert_eq!(refused(&["--lines", "7"]), expected);
    let config = project.read("querl.toml");
    let said = project.refusal(&["model", "corpus", "querl.toml", "--out", "./querl.toml"], 2);
    assert_eq!(said, "--out ./querl.toml: is an input and would be replaced; name another file");
    assert_eq!(project.read("querl.toml"), config);
    std::fs::create_dir(project.path("folder")).unwrap();
    let said = project.refusal(&["model", "corpus", "querl.toml", "--out", "folder"], 2);
    assert_eq!(said, "--out folder: is a folder; name a file in it");
    let said = refused(&["--pretrain", "folder", "--out_model", "model"]);
    assert_eq!(said, "--pretrain folder: is a folder; name a file in it");
    let twice = refused(&["--pretrain", "corpus.jsonl", "--out_model", "model"]);
    assert_eq!(twice, "--pretrain corpus.jsonl: is the file of --out, too; name another file");
    let missing = refused(&["--set", "retrieval.knowledge_base=none.jsonl"]);
    assert!(missing.starts_with("--set retrieval.knowledge_base"), "{missing}");
    project.write("kb.jsonl", "{\"id\": \"a\", \"text\": \"★\"}\n");
    assert_eq!(refused(&[]), "kb.jsonl: no passage has a word; a corpus needs texts with letters or digits");
    assert!(!project.path("corpus.jsonl").exists());
    let args = ["model", "corpus", "querl.toml", "--out", "corpus.jsonl", "--pretrain", "pretrain.toml"];
    project.querl(&args).refused("--out_model <DIR>");
    project.write("pretrain.toml", "corpus = \"c\"\noutput_dir = \"o\"\nseed = 1\nvocab_size = 300\nval_share = 0.9\n[model]\nhidden_size = 8\nintermediate_size = 8\nn_layers = 1\nn_heads = 1\nn_kv_heads = 1\nhead_dim = 8\nmax_positions = 64\n[train]\n");
    let message = project.refusal(&["model", "pretrain", "pretrain.toml"], 2);
    assert_eq!(message, "pretrain.toml: val_share is 0.9; expected 0.0 to 0.5");
    // Symptom: the error for the wrong kind of configuration was an unknown field.
    let message = project.refusal(&["model", "pretrain", "querl.toml"], 2);
    let expected = "querl.toml: a configuration of `querl run`; expected the file that `querl model corpus querl.toml --out corpus.jsonl \
                    --pretrain pretrain.toml --out_model DIR` writes";
    assert_eq!(message, expected);
    for command in [&["run", "pretrain.toml"][..], &["config", "check", "pretrain.toml"]] {
        let message = project.refusal(command, 2);
        let expected = "pretrain.toml: a file for `querl model pretrain`; expected a configuration";
        assert!(message.starts_with(expected), "{message}");
    }
}
