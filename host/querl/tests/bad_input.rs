//! Invalid input: exit code 2 and one sentence that says where, what was found, and how to correct it.
#![allow(clippy::unwrap_used)]

mod support;

use querl_faulty::{Answer, FaultyServer};
use serde_json::json;
use std::net::TcpListener;
use support::{CommandOutput, Project, model, repository, with_sets};

#[test]
fn unusable_configuration_is_reported() {
    let cases = r#"
sample_rate = 0.5 | sample_rate = 1.5 | querl.toml:15: judge.sample_rate is 1.5; expected 0.0 to 1.0
sample_rate | sampel_rate | querl.toml:15: unknown key judge.sampel_rate; did you mean judge.sample_rate?
kind = "rubric" | kind = 1 | querl.toml:14: judge.kind is 1; expected rubric, openai or none
max_steps = 2\nbatch | max_steps = "2"\nbatch | querl.toml:30: rl.max_steps is "2"; expected an integer
[judge] | [judge | querl.toml:13: not valid TOML: unclosed table, expected `]`
tenant = "fivedoctors" |  | querl.toml: the key tenant is missing; expected a string
tenant | device = "cuda:0"\ntenant | device is "cuda:0", which cannot be used: there is no CUDA driver (libcuda.so.1) on this machine; "cpu" and "auto" do without
tenant | device = "gpu"\ntenant | querl.toml:1: device is "gpu"; expected auto, cpu, cuda:N or a list of GPUs such as cuda:0,1
"queries.jsonl" | "queries.xlsx" | querl.toml:4: data.input is "queries.xlsx"; no such file; create it or correct the path
algorithm = "ppo" | algorithm = "grpo" | querl.toml:38: rl.n_samples is 1; rl.algorithm = "grpo" compares samples of one query, expected at least 2 ("ppo" takes 1)
max_steps = 2\nbatch | min_new_tokens = 900\nmax_steps = 2\nbatch | querl.toml:30: rl.min_new_tokens is 900; expected at most rl.max_new_tokens, 8
[rl] | lora_target_modules = ["query"]\n[rl] | querl.toml:29: sft.lora_target_modules is "query"; expected all-linear, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj
"#;
    for case in cases.trim().lines() {
        let [from, to, expected] = case.split(" | ").collect::<Vec<_>>()[..] else { panic!("{case}") };
        let project = Project::new();
        project.edit(&from.replace("\\n", "\n"), &to.replace("\\n", "\n"));
        assert_eq!(project.refusal(&["run", "querl.toml"], 2), expected);
        assert!(!project.path("run").exists(), "{expected}");
    }
}

/// Regression: settings without effect were accepted.
#[test]
fn retrieval_settings_without_effect_are_refused() {
    let http = "kind = \"http\"\nurl = \"http://127.0.0.1:1/x\"";
    let cases = r#"
kind = "embedded"\nmapping = { text = ["/x"] } | retrieval.mapping is set; retrieval.kind = "embedded" has no use for it, leave it out
HTTP\nmapping = { text = ["/x"] } | retrieval.mapping is set; retrieval.service = "general_rag" has no use for it, leave it out
HTTP\nservice = "custom"\nmapping = { request = { query = "{{ query }}" }, text = ["/x"], score = [] } | retrieval.rerank.kind is "none"; retrieval.mapping.score names no scores, so a reranker is required
HTTP\nrerank = { kind = "local", path = ".", scores = "logit" } | retrieval.rerank.scores is "logit"; a local cross-encoder's scores are made 0 to 1 in any case, leave it out
HTTP\nservice = "chatchat" | retrieval.rerank.kind is "none"; retrieval.service = "chatchat" sends no scores, so a reranker is required
HTTP\nservice = "ragflow"\ntop_k = 65 | retrieval.top_k asks for 65 passages; the service returns at most 64
HTTP\nservice = "dify"\nmapping = { success = ["0"] } | retrieval.mapping.status is missing; retrieval.mapping.success says nothing without it
HTTP\nservice = "dify"\nmapping = { status = ["/code"] } | retrieval.mapping.success is missing; retrieval.mapping.status needs it
HTTP\nservice = "dify"\nmapping = { score_range = [1.0, 0.0] } | retrieval.mapping.score_range is [1.0, 0.0]; expected two numbers, the lower first
"#;
    for case in cases.trim().lines() {
        let (to, expected) = case.split_once(" | ").unwrap();
        let project = Project::new();
        project.edit("kind = \"embedded\"", &to.replace("HTTP", http).replace("\\n", "\n"));
        let said = project.refusal(&["run", "querl.toml"], 2);
        assert!(said.ends_with(expected), "{said}\n{expected}");
    }
}

/// One file may configure a retrieval service and its client: each ignores the settings of the other.
#[test]
fn settings_of_a_service_and_of_a_knowledge_base_may_be_in_one_file() {
    let project = Project::new();
    let served = "kind = \"embedded\"\nurl = \"http://127.0.0.1:1/x\"\nembedding = { kind = \"local\", path = \".\" }";
    project.edit("kind = \"embedded\"", served);
    let check = ["config", "check", "querl.toml", "--skip-plugins"];
    for kind in ["embedded", "http"] {
        project.querl(&[&check[..], &["--set", &format!("retrieval.kind={kind}")]].concat()).ok();
    }
    let mapped = ["--set", "retrieval.mapping={ text = [\"/x\"] }", "--set", "retrieval.embedding.kind=none"];
    project.querl(&[&check[..], &mapped].concat()).ok();
}

/// Also on machines without a GPU; no GPU is opened for the check.
#[test]
fn settings_that_named_gpus_do_not_support_are_refused() {
    let refused = |sets: &[&str]| {
        Project::new().refusal(&with_sets(&["config", "check", "querl.toml", "--skip-plugins"], sets), 2)
    };
    assert_eq!(
        refused(&["device=cuda:1", "model.dtype=f32"]),
        "device is \"cuda:1\", which cannot be used: model.dtype is \"f32\" and a GPU stores a frozen base as bf16 or int8 or fp8 \
         or nf4; set it to one of these; \"cpu\" and \"auto\" do without"
    );
    assert_eq!(
        refused(&["device=cuda:0,1", "model.dtype=bf16", "sft.use_dora=true", "sft.lora_dropout=0.1"]),
        "device is \"cuda:0,1\", which cannot be used: sft.use_dora is true and sft.lora_dropout above 0, which together the CPU \
         alone can do; set sft.lora_dropout = 0 or sft.use_dora = false; \"cpu\" and \"auto\" do without"
    );
    let project = Project::new();
    project.copy_model("odd");
    let shapes = std::fs::read_to_string(repository().join("examples/tiny-qwen3/config.json")).unwrap();
    let mut shapes: serde_json::Value = serde_json::from_str(&shapes).unwrap();
    shapes["head_dim"] = 20.into();
    project.write("odd/config.json", &shapes.to_string());
    let args = ["config", "check", "querl.toml", "--skip-plugins", "--set", "model.path=odd", "--set"];
    let with = |device| [&args[..], &[device, "--set", "model.dtype=bf16"]].concat();
    assert_eq!(
        project.refusal(&with("device=cuda:0"), 2),
        "device is \"cuda:0\", which cannot be used: model.path names a model with attention heads of size 20; a GPU generates \
         with head sizes that are a multiple of 8, up to 128; \"cpu\" and \"auto\" do without"
    );
    project.querl(&with("device=cpu")).ok();
    for sets in [["device=cuda:1", "model.dtype=bf16"], ["device=cpu", "model.dtype=f32"]] {
        project.querl(&with_sets(&["config", "check", "querl.toml", "--skip-plugins"], &sets)).ok();
    }
}

/// Regression: `config check` and dry runs accepted a model folder without tokenizer or weights.
#[test]
fn config_check_and_dry_runs_look_into_the_folder_of_the_model() {
    let project = Project::new();
    let check = ["config", "check", "querl.toml", "--skip-plugins", "--set", "model.path=model"];
    let dry_run = ["run", "querl.toml", "--dry-run", "--set", "model.path=model"];
    let damages = [
        ("tokenizer.json", None, "model: no `tokenizer.json` there; "),
        ("tokenizer.json", Some("{"), "model/tokenizer.json: "),
        ("config.json", None, "model: no `config.json` there; "),
        ("config.json", Some("{"), "model/config.json: not JSON: "),
        ("model.safetensors", None, "model: no `model.safetensors` there; "),
        ("model.safetensors", Some("cut"), "model/model.safetensors: "),
    ];
    for (file, text, expected) in damages {
        project.copy_model("model");
        project.querl(&check).ok();
        project.querl(&dry_run).ok();
        match text {
            Some(text) => project.write(&format!("model/{file}"), text),
            None => std::fs::remove_file(project.path(&format!("model/{file}"))).unwrap(),
        }
        for command in [&check[..], &dry_run] {
            let message = project.refusal(command, 2);
            assert!(message.starts_with(expected), "{message}");
        }
        let data_stages = [&dry_run[..], &["--to", "convert"]].concat();
        if file != "config.json" {
            project.querl(&data_stages).ok();
            continue;
        }
        // Symptom: with an empty model folder the data stages used the defaults of a large model.
        for command in [&data_stages[..], &["run", "querl.toml", "--to", "convert", "--set", "model.path=model"]] {
            let message = project.refusal(command, 2);
            assert!(message.starts_with(expected), "{message}");
        }
        assert!(!project.path("run").exists());
    }
}

#[test]
fn unreadable_configuration_file_is_reported() {
    let project = Project::new();
    assert_eq!(project.refusal(&["run", "qerl.toml"], 2), "qerl.toml: no such file; did you mean querl.toml?");
    // Symptom: no remedy where no name is similar.
    let other = project.refusal(&["run", "nope.toml"], 2);
    assert_eq!(other, "nope.toml: no such file; expected the path of a configuration file, such as querl.toml");
    let nowhere = project.refusal(&["run", "nowhere/nope.toml"], 2);
    let expected = "expected the path of a configuration file";
    assert_eq!(nowhere, format!("nowhere/nope.toml: no such file; {expected}"));
    let expected = ".: is a folder, not a configuration file; did you mean ./querl.toml?";
    assert_eq!(project.refusal(&["run", "."], 2), expected);
    std::fs::write(project.path("querl.toml"), b"tenant = 1\n# \xff\n").unwrap();
    assert_eq!(project.refusal(&["run", "querl.toml"], 2), "querl.toml:2: not UTF-8 text; save the file as UTF-8");
}

/// Symptom: the message was an error of the operating system, or a TOML error for a table.
#[test]
fn a_file_of_another_kind_is_named_with_the_one_that_is_expected() {
    let project = Project::new();
    std::fs::write(project.path("queries.xlsx"), b"PK\x03\x04\xff").unwrap();
    for file in ["queries.jsonl", "queries.xlsx"] {
        for command in [&["data", "stats"][..], &["config", "check"], &["run"]] {
            let expected =
                format!("{file}: a file of data, not a configuration; expected a TOML file, such as querl.toml");
            assert_eq!(project.refusal(&[command, &[file]].concat(), 2), expected);
        }
    }
    let problems = [
        ("nope.toml", "no such file"),
        (".", "is a folder"),
        ("queries.xlsx", "not UTF-8 text"),
        ("queries.jsonl", "not a TOML file"),
    ];
    for (file, problem) in problems {
        let expected = "expected the file that `querl model corpus CONFIG --out corpus.jsonl --pretrain pretrain.toml --out_model DIR` writes";
        assert_eq!(project.refusal(&["model", "pretrain", file], 2), format!("{file}: {problem}; {expected}"));
    }
}

#[test]
fn unusable_flags_are_reported() {
    let project = Project::new();
    let set = |assignment| project.refusal(&["run", "querl.toml", "--set", assignment], 2);
    assert_eq!(set("rl.gamma=2"), "--set rl.gamma is 2; expected 0.0 to 1.0");
    assert_eq!(set("rl.gamma"), "--set rl.gamma: expected KEY=VALUE, such as --set rl.max_steps=20");
    let threads = project.refusal(&["run", "querl.toml", "--threads", "100000"], 2);
    assert_eq!(threads, "--threads is 100000; expected 0 to 1024");
    let stages = project.refusal(&["run", "querl.toml", "--from", "rl", "--to", "sft"], 2);
    assert_eq!(stages, "--from rl comes after sft, the last stage to run; choose an earlier --from or a later --to");
}

#[test]
fn unusable_query_table_is_reported() {
    let project = Project::new();
    let table = repository().join("examples/fivedoctors/测试集.xlsx");
    let of_example = format!("{:?}", table.display().to_string());
    project.edit("\"queries.jsonl\"", &of_example).edit("\"original_query\"", "\"提问\"");
    let message = project.refusal(&["run", "querl.toml"], 2);
    assert!(message.contains("提问") && message.contains("问题") && message.contains("用户画像"), "{message}");

    let project = Project::new();
    project.write("queries.jsonl", "{\"original_query\": \"\"}\n{\"original_query\": \" \"}\n");
    let message = project.refusal(&["run", "querl.toml"], 2);
    assert!(message.starts_with("queries.jsonl: "), "{message}");

    let project = Project::new();
    project.edit("\"queries.jsonl\"", "\"queries.xlsx\"").write("queries.xlsx", "not a workbook");
    let message = project.refusal(&["run", "querl.toml"], 2);
    assert!(message.starts_with("queries.xlsx: "), "{message}");
}

/// Symptom: only the run reported them, as a missing field.
#[test]
fn other_columns_of_a_recorded_teacher_show_before_the_run() {
    let project = Project::new();
    for (text, problem) in [
        ("{\"question\": \"a\", \"rewrite\": \"b\"}\n", "has the keys question, rewrite"),
        ("question,rewrite\na,b\n", "not JSON (expected value at byte 1)"),
    ] {
        project.write("teacher.jsonl", text);
        for command in
            [&["config", "check", "querl.toml"][..], &["run", "querl.toml", "--dry-run"], &["run", "querl.toml"]]
        {
            let (message, expected) = (project.refusal(command, 2), "; expected JSON lines with ");
            assert!(message.starts_with(&format!("teacher.jsonl:1: {problem}{expected}")), "{message}");
            assert!(message.ends_with("`history_summary` where the query table has them"), "{message}");
        }
    }
    assert!(!project.path("run/data").exists(), "no stage has run");
}

const LOOKS: [&[&str]; 3] =
    [&["config", "check", "querl.toml"], &["run", "querl.toml", "--dry-run"], &["run", "querl.toml"]];

/// Symptom: `config check` accepted tables and knowledge bases that no run can use, and the run's error did not name the key.
#[test]
fn unusable_tables_and_knowledge_bases_show_before_the_run() {
    let project = Project::new();
    let expected = "retrieval.knowledge_base is a file of JSON lines, .csv, .tsv, .xlsx or .parquet, with id, text \
                    and optionally title";
    for (text, problem) in [
        ("id,text\np1,a\n", ":1: not JSON (expected value at byte 1); "),
        (
            "[\n{\"id\": \"p1\", \"text\": \"a\"}\n]\n",
            ":1: not JSON (a list; expected one object on each line, which `jq -c '.[]' FILE` makes of it); ",
        ),
        ("[{\"id\": \"p1\", \"text\": \"a\"}]\n", ":1: not a JSON object with keys; "),
        ("{\"id\": \"p1\", \"body\": \"a\"}\n", ":1: has the keys body, id; "),
        ("{\"title\": \"p1\", \"text\": \"a\"}\n", ":1: has the keys text, title; "),
        ("\n", ": holds no passage; fill it: "),
    ] {
        project.write("kb.jsonl", text);
        for command in LOOKS {
            let args = [command, &["--set", "retrieval.knowledge_base=kb.jsonl"]].concat();
            assert_eq!(project.refusal(&args, 2), format!("kb.jsonl{problem}{expected}"));
        }
    }
    let good = "{\"id\": \"p1\", \"text\": \"a\"}\n";
    for (text, problem) in [
        (good.repeat(2), "kb.jsonl:2: the id `p1` occurs twice, first in line 1; give each passage its own"),
        (
            good.to_owned() + "{",
            "kb.jsonl:2: not a valid record: the line ends too early; a record is one line; fix or remove the line",
        ),
    ] {
        project.write("kb.jsonl", &text);
        for command in LOOKS {
            let args = [command, &["--set", "retrieval.knowledge_base=kb.jsonl"]].concat();
            assert_eq!(project.refusal(&args, 2), problem);
        }
    }
    for column in ["query_column", "gold_column"] {
        for command in LOOKS {
            let said = project.refusal(&[command, &["--set", &format!("data.{column}=qestion")]].concat(), 2);
            let expected = format!("queries.jsonl: no column `qestion` (data.{column}); found ");
            assert!(said.starts_with(&expected), "{said}");
        }
    }
    assert!(!project.path("run/data").exists(), "no stage has run");
}

/// Symptom: the run was trained to its end, and the top-1 of every system was 0.
#[test]
fn gold_ids_that_no_passage_has_show_before_the_run() {
    let project = Project::new();
    let with_gold = |ids: [&str; 2]| {
        let mut rows = project.rows("queries.jsonl");
        for (row, id) in rows.iter_mut().zip(ids) {
            row["gold_ids"] = id.into();
        }
        let rows: Vec<String> = rows.iter().map(ToString::to_string).collect();
        project.write("queries.jsonl", &rows.join("\n"));
    };
    project.write("kb.jsonl", "{\"id\": \"main-library\", \"text\": \"图书馆\"}\n");
    project.edit(
        &format!("{}/examples/fivedoctors/knowledge_base.jsonl", repository().display()),
        &project.path("kb.jsonl").display().to_string(),
    );
    let message = |n: usize| {
        format!(
            "queries.jsonl:{}: gold id `main_library` is no id of kb.jsonl ({n} of 2 rows with gold ids); correct these ids or add \
             their passages; did you mean `main-library`?",
            3 - n
        )
    };
    let stats = ["data", "stats", "querl.toml"];
    let plan = ["plan", "querl.toml", "--no_model"];
    with_gold(["main_library"; 2]);
    for command in LOOKS.into_iter().chain([&stats[..], &plan]) {
        assert_eq!(project.refusal(command, 2), message(2));
    }
    assert!(!project.path("run/data").exists(), "no stage has run");
    with_gold(["main-library", "main_library"]);
    let warning = format!("warning: {}\n", message(1));
    for command in [LOOKS[0], LOOKS[1], &["run", "querl.toml", "--to", "rewrite"], &stats] {
        let said = project.querl(command).ok();
        assert!(said.stdout.contains(&warning) || said.stderr.contains(&warning), "{said:#?}");
    }
    let said = project.querl(&plan).ok().stdout;
    assert!(said.contains(&format!("!  gold ids   {}\n", message(1))), "{said}");
}

/// Symptom: the missing model was reported before all other errors, and `data stats`, which needs no model, failed.
#[test]
fn a_missing_model_is_named_after_all_other_errors() {
    let project = Project::new();
    project.edit(&format!("{:?}", model().display().to_string()), "\"none\"");
    let missing = "querl.toml:22: model.path is \"none\"; no such folder; ";
    for command in LOOKS.into_iter().take(2) {
        assert!(project.refusal(command, 2).starts_with(missing));
        let said = project.refusal(&[command, &["--set", "data.query_column=qestion"]].concat(), 2);
        assert!(said.starts_with("queries.jsonl: no column `qestion`"), "{said}");
    }
    assert!(project.querl(&["data", "stats", "querl.toml"]).ok().stdout.starts_with("query table queries.jsonl\n"));
    assert!(project.refusal(&["run", "querl.toml"], 2).starts_with(missing));
}

/// Copies the tiny model into the project, so that a test can damage it.
fn own_model(project: &Project) {
    project.copy_model("model");
    project.edit(&format!("{:?}", model().display().to_string()), "\"model\"");
}

#[test]
fn unusable_model_is_reported() {
    for file in ["tokenizer.json", "config.json", "model.safetensors"] {
        let project = Project::new();
        own_model(&project);
        std::fs::remove_file(project.path("model").join(file)).unwrap();
        let message = project.refusal(&["run", "querl.toml"], 2);
        assert!(message.contains(file), "{message}");
    }
    let project = Project::new();
    own_model(&project);
    let config = project
        .read("model/config.json")
        .replace("Qwen3ForCausalLM", "GemmaForCausalLM")
        .replace("\"qwen3\"", "\"gemma\"");
    project.write("model/config.json", &config);
    let message = project.refusal(&["run", "querl.toml"], 2);
    assert!(message.to_lowercase().contains("gemma"), "{message}");

    let project = Project::new();
    own_model(&project);
    let mut config: serde_json::Value = serde_json::from_str(&project.read("model/config.json")).unwrap();
    let n_tokens = config["vocab_size"].take();
    config["vocab_size"] = 10.into();
    project.write("model/config.json", &config.to_string());
    let message = project.refusal(&["run", "querl.toml"], 2);
    let numbers = format!("the tokenizer has {n_tokens} tokens and config.json a vocab_size of 10; ");
    assert!(message.contains(&numbers), "{message}");

    let project = Project::new();
    own_model(&project);
    let weights = std::fs::read(project.path("model/model.safetensors")).unwrap();
    std::fs::write(project.path("model/model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    let message = project.refusal(&["run", "querl.toml"], 2);
    assert!(message.contains("model"), "{message}");
}

/// Regression: a chat template that doubles a string repeatedly used all memory.
#[test]
fn a_chat_template_that_loops_or_doubles_a_string_is_stopped() {
    let project = Project::new();
    own_model(&project);
    for template in [
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'ab' * 40000000 }}{% endfor %}",
        "{% set ns = namespace(x=['ab']) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    ] {
        project.write("model/chat_template.jinja", template);
        let message = project.refusal(&["run", "querl.toml", "--to", "sft"], 2);
        assert!(message.contains("model/chat_template.jinja"), "{template}: {message}");
        assert!(message.contains("rendering ran into its limit of "), "{template}: {message}");
    }
}

#[test]
fn nan_in_weights_is_reported_by_every_command() {
    let project = Project::new();
    own_model(&project);
    let path = project.path("model/model.safetensors");
    let name = "model.layers.0.mlp.up_proj.weight";
    let mut tensors: std::collections::BTreeMap<_, _> = querl_model::load_tensors(&path).unwrap().into_iter().collect();
    let damaged = tensors[name].affine(0.0, f64::NAN).unwrap();
    tensors.insert(name.to_owned(), damaged);
    querl_model::save_tensors(&path, &tensors).unwrap();
    project.write("lines.jsonl", "{\"token_ids\": [1, 2, 3]}\n");
    let commands: [&[&str]; 4] = [
        &["run", "querl.toml", "--to", "sft"],
        &["model", "inspect", "model"],
        &["model", "logprobs", "--model", "model", "--input", "lines.jsonl"],
        &["model", "export", "--model", "model", "--out", "exported"],
    ];
    for arguments in commands {
        let message = project.refusal(arguments, 2);
        let expected = format!("model/model.safetensors: tensor `{name}` holds NaN at [0, 0]; the file is damaged: ");
        assert!(message.contains(&expected), "{arguments:?}: {message}");
    }
}

#[test]
fn rows_that_do_not_fit_the_model_are_named_as_in_the_table() {
    let project = Project::new();
    let message = project.refusal(&["run", "querl.toml", "--to", "sft", "--set", "sft.max_length=32"], 2);
    assert!(message.starts_with("row ") && message.contains(" of the query table (train split) makes "), "{message}");
    assert!(message.ends_with("sft.max_length is 32: shorten the row or raise the limit"), "{message}");
    let message = project.refusal(&["run", "querl.toml", "--set", "rl.max_new_tokens=4096"], 2);
    assert!(message.ends_with("the model has 4096 positions: shorten the row or lower rl.max_new_tokens"), "{message}");
}

#[test]
fn knowledge_that_cannot_be_used_shows_before_any_stage() {
    let project = Project::new();
    let lexicon = format!("{}/examples/fivedoctors/lexicon.json", repository().display());
    project.edit(&lexicon, "lexicon.json").write("lexicon.json", "{");
    let message = project.refusal(&["run", "querl.toml"], 2);
    assert!(message.starts_with("lexicon.json"), "{message}");
    assert!(!project.path("run/data").exists(), "no stage has run");
    project.querl(&["run", "querl.toml", "--to", "rewrite"]).ok();

    let project = Project::new();
    let judge = "kind = \"openai\"\nbase_url = \"http://127.0.0.1:9/v1\"\nmodel = \"m\"\napi_key_env = \"NO_SUCH_KEY\"";
    project.edit("kind = \"rubric\"", judge);
    let message = project.refusal(&["run", "querl.toml"], 2);
    assert!(message.contains("judge.api_key_env") && message.contains("NO_SUCH_KEY"), "{message}");
    assert!(!project.path("run/data").exists(), "no stage has run");
}

#[test]
fn recipe_of_a_small_model_names_the_line() {
    let project = Project::new();
    project.write("pretrain.toml", "corpus = \"corpus.jsonl\"\noutput_dir = \"out\"\nsead = 1\n");
    let message = project.refusal(&["model", "pretrain", "pretrain.toml"], 2);
    assert!(message.starts_with("pretrain.toml:3: unknown field `sead`"), "{message}");
    assert!(!project.path("out").exists());
    // Regression: the folder of the unfinished model was not removed.
    project.write("corpus.jsonl", "{\"text\": \"鱼油怎么吃\"}\n");
    let shape =
        "intermediate_size = 8\nn_layers = 1\nn_heads = 1\nn_kv_heads = 1\nhead_dim = 8\nmax_positions = 64\n[train]\n";
    let recipe = format!(
        "corpus = \"corpus.jsonl\"\noutput_dir = \"out\"\nseed = 1\nvocab_size = 300\n[model]\nhidden_size = 0\n{shape}"
    );
    project.write("pretrain.toml", &recipe);
    let message = project.refusal(&["model", "pretrain", "pretrain.toml"], 2);
    assert!(message.starts_with("pretrain.toml: no model can be made of it: "), "{message}");
    let refuse = |text: &str| {
        project.write("pretrain.toml", text);
        project.refusal(&["model", "pretrain", "pretrain.toml"], 2)
    };
    let message = refuse(&recipe.replace("= 300", "= 100"));
    let expected = "pretrain.toml:4: vocab_size is 100; expected at least 259, for 256 bytes and the special tokens";
    assert_eq!(message, expected);
    let sound = recipe.replace("hidden_size = 0", "hidden_size = 8");
    let message = refuse(&sound.replace("n_heads = 1\nn_kv_heads = 1", "n_heads = 5\nn_kv_heads = 2"));
    assert!(message.ends_with("model.n_heads 5 is not a multiple of model.n_kv_heads 2"), "{message}");
    let message = refuse(&format!("{sound}max_length = 1\n"));
    assert!(message.starts_with("corpus.jsonl:1: has ") && message.contains("; train.max_length is 1: "), "{message}");
    let message = refuse(&sound.replace("corpus.jsonl", "none.jsonl"));
    assert!(message.starts_with("pretrain.toml: corpus is none.jsonl; no such file: write it with"), "{message}");
    project.write("corpus.jsonl", "{\"query\": \"a\", \"answer\": \"b\"}\n");
    let message = refuse(&sound);
    assert!(message.starts_with("corpus.jsonl:1: expected `text`, "), "{message}");
    assert!(message.ends_with("; has the keys answer, query"), "{message}");
    assert!(!project.path("out/.pretrain").exists());
}

#[test]
fn damaged_rows_of_an_earlier_stage_are_reported() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    let rows = project.path("run/data/train.jsonl");
    let whole = std::fs::read(&rows).unwrap();
    let within_a_character = whole.iter().rposition(|byte| *byte >= 0x80).unwrap();
    std::fs::write(&rows, &whole[..within_a_character]).unwrap();
    let said = project.refusal(&["run", "querl.toml"], 2);
    let remedy = "put the file back, or run `querl convert CONFIG --from convert` to make it again";
    let expected = format!("run/data/train.jsonl: has {within_a_character} of {} bytes; {remedy}", whole.len());
    assert_eq!(said, expected);
    // Ledgers of earlier versions contain no digests of outputs.
    let mut ledger: serde_json::Value = serde_json::from_str(&project.read("run/stages.json")).unwrap();
    for entry in ledger["stages"].as_object_mut().unwrap().values_mut() {
        entry.as_object_mut().unwrap().remove("outputs");
    }
    project.write("run/stages.json", &ledger.to_string());
    let said = project.refusal(&["run", "querl.toml"], 2);
    assert!(said.starts_with(&format!("run/data/train.jsonl:{}: not a valid record", lines(&whole))), "{said}");
    assert!(said.ends_with("; remove the file, and `querl run` makes it again"), "{said}");
    std::fs::remove_file(&rows).unwrap();
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    assert_eq!(std::fs::read(&rows).unwrap(), whole);
}

fn lines(text: &[u8]) -> usize {
    text.iter().filter(|byte| **byte == b'\n').count()
}

#[test]
fn unusable_plugin_is_reported() {
    let reward = format!("{}/plugins/reward-competition", repository().display());
    let project = Project::new();
    project.edit(&reward, "reward.wasm").write("reward.wasm", "not WebAssembly");
    let expected = "plugin reward.wasm: it is not WebAssembly; expected a component";
    assert_eq!(project.refusal(&["run", "querl.toml"], 2), expected);

    let project = Project::new();
    project.edit(&reward, &format!("{}/plugins/filter-quality", repository().display()));
    let message = project.refusal(&["run", "querl.toml"], 2);
    // The line of the key is the last of the file.
    let place = format!(
        "querl.toml:{}: plugins.rewards[0].path: plugin filter-quality ",
        project.read("querl.toml").lines().count()
    );
    assert!(message.starts_with(&place), "{message}");
    assert!(message.ends_with("it is a filter plugin; expected a reward plugin"), "{message}");

    let project = Project::new();
    let text = project.read("querl.toml") + "settings = { tanh_skale = 2 }\n";
    project.write("querl.toml", &text);
    let message = project.refusal(&["run", "querl.toml"], 2);
    assert!(message.contains("tanh_skale"), "{message}");
}

#[test]
fn plugin_source_that_does_not_build_shows_the_output_of_cargo() {
    let project = Project::new();
    let reward = format!("{}/plugins/reward-competition", repository().display());
    project.edit(&reward, "broken");
    std::fs::create_dir_all(project.path("broken/src")).unwrap();
    project.write(
        "broken/Cargo.toml",
        "[package]\nname = \"broken\"\nversion = \"0.1.0\"\n[lib]\ncrate-type = [\"cdylib\"]\n[workspace]\n",
    );
    project.write("broken/src/lib.rs", "pub fn f() -> u32 { \"no\" }\n");
    let said = project.querl(&["run", "querl.toml", "-q"]);
    assert_eq!(said.code, Some(2), "{said:#?}");
    assert!(said.stderr.contains("mismatched types"), "{said:#?}");
    let expected = "error: plugin broken: cargo could not build it: its output is above\n";
    assert!(said.stderr.ends_with(expected), "{said:#?}");
}

#[test]
fn teacher_that_refuses_the_key_is_reported() {
    let project = Project::new();
    let server = FaultyServer::start(|_| Answer::json(401, &json!({"error": {"message": "no"}})).into());
    let url = server.url();
    let teacher = format!("kind = \"openai\"\nbase_url = \"{url}/v1\"\nmodel = \"m\"\napi_key_env = \"TEST_KEY\"");
    project.edit("kind = \"recorded\"\npath = \"teacher.jsonl\"", &teacher);
    let missing = project.refusal(&["run", "querl.toml"], 2);
    assert!(missing.contains("teacher.api_key_env") && missing.contains("TEST_KEY"), "{missing}");

    let output = project.command(&["run", "querl.toml", "-q"]).env("TEST_KEY", "sk-very-secret").output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
    assert!(stderr.contains("401") && !stderr.contains("sk-very-secret"), "{stderr}");
    for entry in std::fs::read_dir(project.path("run")).unwrap().flatten().filter(|entry| entry.path().is_file()) {
        assert!(!std::fs::read_to_string(entry.path()).unwrap().contains("sk-very-secret"), "{:?}", entry.path());
    }
}

#[test]
fn retrieval_that_is_down_is_reported() {
    let project = Project::new();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let http = format!("kind = \"http\"\nurl = \"http://{free}/api/chat/general_rag\"\nmax_retries = 0");
    project.edit("kind = \"embedded\"", &http);
    let message = project.refusal(&["run", "querl.toml"], 2);
    assert!(message.contains("unreachable") && message.contains(&free.to_string()), "{message}");
    assert!(project.path("run/data/rewrites.jsonl").is_file(), "what was done is kept");
}

#[test]
fn folder_without_a_run_is_reported() {
    let project = Project::new();
    std::fs::create_dir(project.path("empty")).unwrap();
    let expected = "not a run's folder: it has no config.resolved.toml; expected the folder that `querl run` writes, the output_dir of a configuration; run `querl run CONFIG` first";
    let of_run: [&[&str]; 8] = [
        &["report", "empty"],
        &["audit", "empty"],
        &["watch", "empty", "--once"],
        &["track", "empty", "--to", "wandb"],
        &["plan", "empty"],
        &["export", "trl", "empty", "--out", "new"],
        &["deploy", "empty", "--out", "new"],
        &["plugin", "replay", "empty", "--plugin", "plugins/reward-competition"],
    ];
    for args in of_run {
        assert_eq!(project.refusal(args, 2), format!("empty: {expected}"), "{args:?}");
    }
    let missing = project.refusal(&["report", "nowhere"], 2);
    assert!(missing.starts_with("nowhere: not a run's folder: there is no such folder; "), "{missing}");
    assert!(!project.path("nowhere").exists());
    project.querl(&["run", "querl.toml", "--to", "rewrite"]).ok();
    assert_eq!(project.refusal(&["report", "run"], 2), "run: not an evaluated run; run `querl eval CONFIG` first");
    let folder = "run: is a folder, not a configuration file; did you mean run/config.resolved.toml?";
    assert_eq!(project.refusal(&["eval", "run"], 2), folder);
}

/// Regression: the program panicked because the resolved configuration could not contain a path that is not UTF-8.
#[cfg(unix)]
#[test]
fn an_argument_that_is_not_utf8_is_a_sentence() {
    use std::os::unix::ffi::OsStrExt;
    let project = Project::new();
    let odd = std::ffi::OsStr::from_bytes(b"a\xffb");
    let stderr = |args: &[&std::ffi::OsStr]| {
        let output = project.command(&[]).args(args).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        stderr
    };
    let text = std::ffi::OsStr::new;
    let message = stderr(&[text("run"), text("querl.toml"), text("--out"), odd]);
    assert!(message.ends_with("a\u{fffd}b: the path is not UTF-8 text; rename the file or folder\n"), "{message}");
    for args in [[text("run"), odd], [text("report"), odd], [text("model"), odd]] {
        stderr(&args);
    }
    std::fs::create_dir(project.folder.path().join(odd)).unwrap();
    std::fs::copy(project.path("querl.toml"), project.folder.path().join(odd).join("querl.toml")).unwrap();
    let path = std::path::Path::new(odd).join("querl.toml");
    let message = stderr(&[text("config"), text("check"), path.as_os_str()]);
    assert!(message.contains("the path is not UTF-8 text"), "{message}");
}

/// Regression: a log that could not be written ended the run.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_behind_the_log_ends_no_run() {
    let project = Project::new();
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let status = project.command(&["run", "querl.toml", "--to", "sft", "-v"]).stderr(full).status().unwrap();
    assert_eq!(status.code(), Some(0));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status =
        project.command(&["run", "querl.toml", "--from", "sft", "--to", "sft"]).stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(0));
}

/// Regression: SIGHUP ended a run that was started with `nohup`; SIGXFSZ killed one that reached the limit of file sizes.
#[cfg(target_os = "linux")]
#[test]
fn nohup_and_a_limit_of_file_sizes_are_respected() {
    let project = Project::new();
    let binary = env!("CARGO_BIN_EXE_querl");
    let shell = |script: String| {
        let mut command = std::process::Command::new("bash");
        command.args(["-c", &script]).current_dir(project.folder.path());
        CommandOutput::of(command.output().unwrap(), project.folder.path())
    };
    let run = format!("{binary} run querl.toml --to convert");
    let survived = shell(format!(
        "trap '' HUP; {run} & for i in 1 2 3 4 5 6; do kill -HUP $! 2> /dev/null; sleep 0.05; done; wait $!"
    ));
    assert_eq!(survived.code, Some(0), "{survived:#?}");
    // SIGHUP is ignored from the start of the process.
    let burst = shell(format!(
        "trap '' HUP; for i in $(seq 50); do {binary} config schema > schema & while kill -HUP $!; do :; done 2> /dev/null; wait $! || exit; done"
    ));
    assert_eq!(burst.code, Some(0), "{burst:#?}");
    let limited = shell(format!("ulimit -f 8; {run} --from rewrite"));
    assert_eq!(limited.code, Some(1), "{limited:#?}");
    assert!(limited.stderr.contains("File too large") && limited.stderr.contains("cannot be written"), "{limited:#?}");
}

/// Symptom: a small stack, little memory or little CPU time ended the process by SIGSEGV, SIGABRT, SIGXCPU or SIGKILL.
#[cfg(target_os = "linux")]
#[test]
fn limits_of_the_shell_end_in_a_sentence_and_not_by_a_signal() {
    let project = Project::new();
    let limited =
        |limit: &str, args: &str| project.querl_after(&format!("ulimit {limit}"), &args.split(' ').collect::<Vec<_>>());
    limited("-s 64", "run querl.toml --to sft").ok();
    // With the lower limits, it depends on the machine at which allocation the memory is exhausted.
    for limit in ["-v 100000", "-v 220000", "-v 400000", "-v 1572864"] {
        let little_memory = limited(limit, "run querl.toml --from rewrite --to sft");
        let last = little_memory.stderr.lines().last().unwrap_or_default();
        let is_sentence = matches!(little_memory.code, Some(1 | 2)) && last.starts_with("error: ");
        // The C library aborts if a new thread has no memory for its thread-local values.
        let is_of_libc = last.starts_with("Fatal glibc error: failed to register TLS destructor: out of memory");
        assert!(little_memory.code == Some(0) || is_sentence || is_of_libc, "{limit}: {little_memory:#?}");
        assert!(!little_memory.stderr.contains("panicked at"), "{limit}: {little_memory:#?}");
    }
    let long = "run querl.toml --to sft --set sft.max_steps=1000000 --set sft.epochs=1000000";
    let little_time = limited("-t 6", long);
    assert_eq!(little_time.code, Some(130), "{little_time:#?}");
    let said = &little_time.stderr;
    let expected = "the limit of CPU time (`ulimit -t`) is reached: stopping at the next safe point\n";
    assert!(said.contains(expected), "{said}");
    assert!(said.contains("the state is saved; run the same command again to resume"), "{said}");
}

/// Symptom: weights that could not be mapped because of a limit on address space were reported as "damaged or truncated", with exit code 2.
#[cfg(target_os = "linux")]
#[test]
fn want_of_memory_is_not_called_a_damaged_file() {
    let project = Project::new();
    project.copy_model("model");
    // A sparse file: it takes no disk space, and more address space than the limit.
    let weights = std::fs::File::options().write(true).open(project.path("model/model.safetensors")).unwrap();
    weights.set_len(64 << 30).unwrap();
    let output = project.querl_after("ulimit -v 16777216", &["model", "inspect", "model"]);
    let expected = "error: model/model.safetensors: too little memory or address space to read it; free some, or raise the limit (`ulimit -v`): \
                    Cannot allocate memory (os error 12)\n";
    assert_eq!((output.code, output.stderr.as_str()), (Some(1), expected));
}

/// Symptom: messages without a remedy, such as "stream did not contain valid UTF-8".
#[test]
fn damaged_files_of_a_model_are_named_with_a_remedy() {
    let project = Project::new();
    let cases: [(&str, &[u8], &str); 7] = [
        ("config.json", b"{", "not JSON: EOF while parsing an object at line 1 column 1"),
        ("config.json", b"\xff", "not JSON: expected value at line 1 column 1"),
        (
            "tokenizer.json",
            b"",
            "not a tokenizer as tokenizers 0.23 or older saves it: EOF while parsing a value at line 1 column 0",
        ),
        ("tokenizer_config.json", b"[", "not JSON: EOF while parsing a list at line 1 column 1"),
        ("generation_config.json", b"", "not JSON: EOF while parsing a value at line 1 column 0"),
        ("chat_template.jinja", b"a\n\xff", "line 2 is not UTF-8 text"),
        ("model.safetensors", b"", "damaged or truncated safetensors file (header too small)"),
    ];
    for (file, content, problem) in cases {
        let _ = std::fs::remove_dir_all(project.path("model"));
        project.copy_model("model");
        std::fs::write(project.path("model").join(file), content).unwrap();
        let message = project.refusal(&["model", "inspect", "model"], 2);
        assert_eq!(message, format!("model/{file}: {problem}; download or save it again"));
    }
}

#[test]
fn a_damaged_ledger_and_an_unusable_folder_are_mistakes_of_the_user() {
    let project = Project::new();
    project.querl(&["run", "querl.toml", "--to", "convert"]).ok();
    let file = project.refusal(&["run", "querl.toml", "--out", "queries.jsonl"], 2);
    assert_eq!(file, "queries.jsonl: a file, not a folder; choose another folder, or change `output_dir`");
    // Symptom: the folder that cannot exist was called a file.
    assert_eq!(project.refusal(&["run", "querl.toml", "--out", "queries.jsonl/x"], 2), file);
    project.write("run/stages.json", "{");
    let ledger = project.refusal(&["run", "querl.toml"], 2);
    assert!(ledger.starts_with("run/stages.json: not a ledger of stages (EOF while parsing"), "{ledger}");
    assert!(ledger.ends_with("; put the file back, or remove it to run all stages again"), "{ledger}");
    project.copy_model("model");
    let special = r#"{"eos_token": "<|im_end|>", "chat_template": "{{ raise_exception('no') }}"}"#;
    project.write("model/tokenizer_config.json", special);
    std::fs::remove_file(project.path("run/stages.json")).unwrap();
    let template = project.refusal(&["run", "querl.toml", "--set", "model.path=\"model\""], 2);
    let place =
        "model/tokenizer_config.json: `chat_template`, line 1: invalid operation: no; correct the template, or ";
    let place_of_file = "model/chat_template.jinja:1: chat template: invalid operation: no; correct the template, or ";
    assert!(template.contains(place) || template.contains(place_of_file), "{template}");
}

/// Regression: passages without a visible character, or with an id that a list of gold ids cannot contain, were accepted.
#[test]
fn a_passage_that_cannot_be_used_is_refused() {
    let project = Project::new();
    let refusal = |line: &str| {
        project.write("kb.jsonl", &format!("{line}\n"));
        let knowledge_base = "retrieval.knowledge_base=\"kb.jsonl\"";
        project.refusal(&["run", "querl.toml", "--to", "validate", "--set", knowledge_base], 2)
    };
    let message = refusal("{\"id\": \"p1\u{3000}\", \"text\": \"x\"}");
    let expected = "kb.jsonl:1: the id \"p1\\u{3000}\" has the character '\\u{3000}', which separates the ids in a list of gold ids; \
                    write the id without it";
    assert!(message.ends_with(expected), "{message}");
    let message = refusal("{\"id\": \"p1\", \"text\": \"\u{200b}\u{2060}\"}");
    assert!(message.ends_with("kb.jsonl:1: the text of `p1` is empty; write one, or remove the line"), "{message}");
}
