//! Inputs for prompts, and odd responses of models that prompt plugins must parse.

use super::{long_text, odd_texts};
use querl_core::ports::{PromptInput, PromptTask};
use querl_core::records::Context;
use serde::Serialize;

/// Task and input of a prompt, owned.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct PromptCase {
    pub(crate) task: PromptTask,
    pub(crate) query: String,
    pub(crate) context: Context,
    pub(crate) rewrite: Option<String>,
}

impl PromptCase {
    pub(crate) fn new(task: PromptTask, query: &str, context: Context, rewrite: &str) -> Self {
        let rewrite = (task == PromptTask::Judge).then(|| rewrite.to_owned());
        Self { task, query: query.into(), context, rewrite }
    }

    pub(crate) fn input(&self) -> PromptInput<'_> {
        PromptInput { query: &self.query, context: &self.context, rewrite: self.rewrite.as_deref() }
    }
}

pub(crate) fn ordinary() -> Vec<PromptCase> {
    let context =
        Context { user_profile: "女，32岁，孕中期".into(), history_summary: "用户问过虾青素".into() };
    let of = |task| PromptCase::new(task, "孕妇能吃虾青素不", context.clone(), "孕妇是否适合服用虾青素软胶囊");
    PromptTask::ALL.into_iter().map(of).collect()
}

pub(crate) fn odd(task: PromptTask) -> Vec<PromptCase> {
    let long = long_text();
    let everywhere = |text: &str| {
        PromptCase::new(task, text, Context { user_profile: text.into(), history_summary: text.into() }, text)
    };
    let mut inputs: Vec<_> = odd_texts().into_iter().map(|(_, text)| everywhere(text)).collect();
    inputs.push(PromptCase::new(task, "胶原咋吃", Context::default(), "胶原蛋白肽的服用方法"));
    inputs.push(PromptCase::new(task, &long, Context::default(), "胶原"));
    inputs.push(PromptCase::new(
        task,
        "胶原咋吃",
        Context { history_summary: long.clone(), ..Context::default() },
        "胶原",
    ));
    inputs.push(PromptCase::new(task, "胶原咋吃", Context::default(), &long));
    inputs
}

/// About 100 kB.
const LONG_BYTES: usize = 100_000;

/// Edge-case responses that a prompt plugin has to parse as a rewrite.
pub(crate) fn for_rewrite() -> Vec<String> {
    let mut answers = common();
    answers.extend(
        ["胶原蛋白肽的服用方法", "“胶原蛋白肽的服用方法”", "改写后的查询：", "- ", "1.", "**", "好的："]
            .map(str::to_owned),
    );
    let values = ["null", "5", "[]", "{}", "\"\"", "\" \"", "\"\\u0000\"", "\"\\ud800\"", "NaN"];
    answers.extend(values.iter().map(|value| format!("{{\"rewritten_query\": {value}}}")));
    answers
}

/// Edge-case responses that a prompt plugin has to parse as a judgement.
pub(crate) fn for_judgement() -> Vec<String> {
    let mut answers = common();
    let values = [
        "4.5",
        "0",
        "5",
        "-0.0",
        "-1",
        "-1e-300",
        "5.0000001",
        "1e999",
        "-1e999",
        "1e-999",
        "NaN",
        "Infinity",
        "null",
        "true",
        "[4]",
        "{\"score\": 4}",
        "\"4.5\"",
        "\"高\"",
        "\"\"",
        "\"90/100\"",
        "\"四分\"",
        "\"４．５\"",
        "\"∞\"",
    ];
    for value in values {
        answers.push(format!("{{\"综合得分\": {value}, \"评分理由\": \"清楚\"}}"));
        answers.push(format!("{{\"score\": {value}, \"reason\": \"清楚\"}}"));
        answers.push(value.to_owned());
        answers.push(format!("综合得分：{value}"));
    }
    answers.push(format!("{{\"综合得分\": {}}}", "9".repeat(LONG_BYTES)));
    answers.push(format!("综合得分：0.{}", "4".repeat(LONG_BYTES)));
    answers
}

fn common() -> Vec<String> {
    let mut answers: Vec<_> = odd_texts().into_iter().map(|(_, text)| text.to_owned()).collect();
    let fragments =
        ["{", "}", "{\"", "{\"a\":", "[", "```", "```json\n{", "<think>", "</think>", "<think></think>", "null"];
    answers.extend(fragments.map(str::to_owned));
    answers.push(long_text());
    let repeated = ["{", "[", "{\"a\":", "\"", "\n", "<think>", "</think>", "```\n", "：", "\u{200b}", "- ", "“”"];
    answers.extend(repeated.map(|text| text.repeat(LONG_BYTES / text.len())));
    answers
}
