//! Inputs for prompts.

use super::texts;
use querl_core::ports::{PromptInput, PromptTask};
use querl_core::records::Context;
use serde::Serialize;

/// A prompt's task and input, owned.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Asked {
    #[serde(skip)]
    pub(crate) task: PromptTask,
    #[serde(rename = "task")]
    pub(crate) task_name: &'static str,
    pub(crate) query: String,
    pub(crate) context: Context,
    pub(crate) rewrite: Option<String>,
}

impl Asked {
    pub(crate) fn new(task: PromptTask, query: &str, context: Context, rewrite: &str) -> Self {
        let rewrite = (task == PromptTask::Judge).then(|| rewrite.to_owned());
        Self { task, task_name: name(task), query: query.into(), context, rewrite }
    }

    pub(crate) fn input(&self) -> PromptInput<'_> {
        PromptInput { query: &self.query, context: &self.context, rewrite: self.rewrite.as_deref() }
    }
}

pub(crate) const TASKS: [PromptTask; 3] = [PromptTask::TeacherRewrite, PromptTask::PolicyRewrite, PromptTask::Judge];

/// As golden cases write it.
pub(crate) fn name(task: PromptTask) -> &'static str {
    match task {
        PromptTask::TeacherRewrite => "teacher_rewrite",
        PromptTask::PolicyRewrite => "policy_rewrite",
        PromptTask::Judge => "judge",
    }
}

/// One ordinary input for each task.
pub(crate) fn ordinary() -> Vec<Asked> {
    let context =
        Context { user_profile: "女，32岁，孕中期".into(), history_summary: "用户问过虾青素".into() };
    let of = |task| Asked::new(task, "孕妇能吃虾青素不", context.clone(), "孕妇是否适合服用虾青素软胶囊");
    TASKS.into_iter().map(of).collect()
}

/// Every odd input of one task.
pub(crate) fn odd(task: PromptTask) -> Vec<Asked> {
    let long = texts::long();
    let everywhere =
        |text: &str| Asked::new(task, text, Context { user_profile: text.into(), history_summary: text.into() }, text);
    let mut inputs: Vec<_> = texts::odd().into_iter().map(|(_, text)| everywhere(text)).collect();
    inputs.push(Asked::new(task, "胶原咋吃", Context::default(), "胶原蛋白肽的服用方法"));
    inputs.push(Asked::new(task, &long, Context::default(), "胶原"));
    inputs.push(Asked::new(task, "胶原咋吃", Context { history_summary: long.clone(), ..Context::default() }, "胶原"));
    inputs.push(Asked::new(task, "胶原咋吃", Context::default(), &long));
    inputs
}
