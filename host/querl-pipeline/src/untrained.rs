//! Prompts of the evaluated systems that need no training: the prompted base model, and HyDE.

use crate::ledger::rows_of;
use crate::run::Run;
use querl_core::config::PromptedWith;
use querl_core::ports::{PluginFault, PromptInput, PromptTask};
use querl_core::records::{DatasetRow, Message, QueryRow, Split};

/// Rows with the prompts of the system `prompted`: the prompt of `eval.prompted_with`, with `eval.few_shot` rewrites of the training split
/// as examples.
///
/// # Errors
/// The training split cannot be read, or the prompt plugin fails.
pub(crate) fn prompted_rows(run: &Run, rows: &[DatasetRow]) -> anyhow::Result<Vec<DatasetRow>> {
    let n_examples = run.config.eval.few_shot;
    let train: Vec<DatasetRow> = if n_examples > 0 { rows_of(&run.dir.split(Split::Train))? } else { Vec::new() };
    let turns = examples(&train, n_examples).map(|row| Ok(turns(prompt_of(run, row)?, row.target())));
    let turns: Vec<Message> = turns.collect::<Result<Vec<_>, PluginFault>>()?.concat();
    let prompted = |row: &DatasetRow| {
        let messages = with_examples(prompt_of(run, row)?, &turns);
        Ok(DatasetRow { messages, metadata: row.metadata.clone() })
    };
    Ok(rows.iter().map(prompted).collect::<Result<_, PluginFault>>()?)
}

/// `n` evenly spaced rows with a rewrite: the middle of each of `n` equal parts.
fn examples(rows: &[DatasetRow], n: usize) -> impl Iterator<Item = &DatasetRow> {
    let rewritten: Vec<&DatasetRow> = rows.iter().filter(|row| row.target().is_some()).collect();
    let n = n.min(rewritten.len());
    (0..n).map(move |index| rewritten[(2 * index + 1) * rewritten.len() / (2 * n)])
}

fn prompt_of(run: &Run, row: &DatasetRow) -> Result<Vec<Message>, PluginFault> {
    match run.config.eval.prompted_with {
        PromptedWith::Policy => Ok(row.prompt().to_vec()),
        PromptedWith::Teacher => {
            let (query, context) = (&row.metadata.query, row.metadata.query.context());
            let input = PromptInput { query: &query.original_query, context: &context, rewrite: None };
            run.plugins.prompts.messages(PromptTask::TeacherRewrite, &input)
        }
    }
}

fn is_system(message: &Message) -> bool {
    message.role == "system"
}

/// The user turn of a prompt, followed by the rewrite as assistant turn.
fn turns(prompt: Vec<Message>, target: Option<&str>) -> Vec<Message> {
    let answer = target.map(|content| Message { role: "assistant".into(), content: content.into() });
    prompt.into_iter().filter(|message| !is_system(message)).chain(answer).collect()
}

/// A prompt with example turns after its system message.
fn with_examples(prompt: Vec<Message>, examples: &[Message]) -> Vec<Message> {
    let (system, question): (Vec<Message>, Vec<Message>) = prompt.into_iter().partition(is_system);
    system.into_iter().chain(examples.iter().cloned()).chain(question).collect()
}

/// Rows with the prompts of the system `hyde`, which ask for a passage that answers the query; the passage is the search text instead of a
/// rewrite.
///
/// Source: HyDE (Gao et al. 2022, "Precise Zero-Shot Dense Retrieval without Relevance Labels"), one pseudo-answer for each query, with the
/// conversation in the prompt. Departure: retrieval gets one text, as for any rewrite, instead of the mean of several embeddings.
pub(crate) fn hyde_rows(rows: &[DatasetRow]) -> Vec<DatasetRow> {
    let row = |row: &DatasetRow| DatasetRow {
        messages: vec![Message { role: "user".into(), content: hyde_prompt(&row.metadata.query) }],
        metadata: row.metadata.clone(),
    };
    rows.iter().map(row).collect()
}

fn hyde_prompt(query: &QueryRow) -> String {
    let parts = [
        ("Conversation so far", query.history_summary.as_str()),
        ("About the user", query.user_profile.as_str()),
        ("Question", query.original_query.as_str()),
    ];
    let parts = parts.into_iter().filter(|(_, text)| !text.trim().is_empty());
    let lines: Vec<String> = parts.map(|(name, text)| format!("{name}: {text}")).collect();
    format!(
        "Please write a short passage of a knowledge base that answers the question, in the language of the question. \
         Write the passage alone.\n\n{}\nPassage:",
        lines.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::testing::dataset_row;

    fn message(role: &str, content: &str) -> Message {
        Message { role: role.into(), content: content.into() }
    }

    #[test]
    fn examples_stand_between_the_system_message_and_the_question() {
        let shown = turns(vec![message("system", "rules"), message("user", "one?")], Some("one"));
        let prompt = with_examples(vec![message("system", "rules"), message("user", "two?")], &shown);
        let roles: Vec<(&str, &str)> =
            prompt.iter().map(|message| (message.role.as_str(), message.content.as_str())).collect();
        assert_eq!(roles, [("system", "rules"), ("user", "one?"), ("assistant", "one"), ("user", "two?")]);
    }

    #[test]
    fn examples_are_spread_over_the_rows_that_have_a_rewrite() {
        let rewritten = |id: &str| {
            let mut row = dataset_row(id);
            row.messages.push(message("assistant", "rewrite"));
            row
        };
        let rows = [rewritten("a"), dataset_row("none"), rewritten("b"), rewritten("c"), rewritten("d")];
        let ids = |n| examples(&rows, n).map(|row| row.metadata.query.id.as_str()).collect::<Vec<_>>();
        assert_eq!((ids(0), ids(2)), (vec![], vec!["b", "d"]));
        assert_eq!(ids(9), ["a", "b", "c", "d"]);
    }

    #[test]
    fn a_pseudo_answer_is_requested_with_what_is_known_of_the_conversation() {
        let mut row = dataset_row("a");
        row.metadata.query.history_summary = "asked about fish oil".into();
        let rows = hyde_rows(&[row]);
        let content = &rows[0].messages[0].content;
        let expected = "Conversation so far: asked about fish oil\nQuestion: query a\nPassage:";
        assert!(content.ends_with(expected), "{content}");
        assert_eq!(rows[0].prompt().len(), 1);
    }
}
