//! Prompt plugins as an implementation of the port [`Prompts`](querl_core::ports::Prompts).

use crate::call::Caller;
use crate::limits::CallSize;
use crate::text::printable;
use querl_core::ports::{ParsedJudgement, PluginFault, PromptInput, PromptTask, Prompts};
use querl_core::records::{Message, Rejection};

/// Maximum number of bytes of a query or response in the message of a fault.
const SHOWN_BYTES: usize = 120;

pub(crate) struct PromptPlugin {
    caller: Caller,
}

impl PromptPlugin {
    pub(crate) fn new(caller: Caller) -> Self {
        Self { caller }
    }

    /// Adds the query or response to a fault.
    fn named(&self, what: &str, text: &str, fault: &PluginFault) -> PluginFault {
        self.caller.in_batch(fault, what, &[&printable(text, SHOWN_BYTES)])
    }
}

impl Prompts for PromptPlugin {
    fn messages(&self, task: PromptTask, input: &PromptInput<'_>) -> Result<Vec<Message>, PluginFault> {
        let fault = |message: String| self.named("query", input.query, &self.caller.invalid_result(message));
        let made = self.caller.call("prompts.messages", CallSize::of(1), |guest| {
            self.caller.exports.contract.messages(guest, task, input)
        });
        let made = made.map_err(|error| self.named("query", input.query, &error))?;
        let messages = made.map_err(|reason| {
            let Rejection { code, detail, .. } = reason;
            let (code, detail) = (printable(&code, 100), printable(&detail, 500));
            fault(format!("rejected the task {task:?} with `{code}`: {detail}; expected messages"))
        })?;
        let system_later = messages.iter().skip(1).any(|message| message.role == "system");
        match messages.last() {
            Some(last) if last.role == "user" && !system_later => Ok(messages),
            Some(last) if last.role != "user" => {
                Err(fault(format!("the last message is from `{}`; expected `user`", last.role)))
            }
            Some(_) => Err(fault("a system message is not at the start".into())),
            None => Err(fault("returned no messages".into())),
        }
    }

    fn parse_rewrite(&self, text: &str) -> Result<Result<String, Rejection>, PluginFault> {
        let fault = |message: String| self.named("answer", text, &self.caller.invalid_result(message));
        let parsed = self.caller.call("prompts.parse-rewrite", CallSize::of(1), |guest| {
            self.caller.exports.contract.parse_rewrite(guest, text)
        });
        match parsed.map_err(|error| self.named("answer", text, &error))? {
            Ok(rewrite) if rewrite.trim().is_empty() => {
                Err(fault("returned a blank rewrite; expected a rejection".into()))
            }
            Ok(rewrite) => Ok(Ok(rewrite)),
            Err(rejection) => self.caller.rejection(rejection).map(Err).map_err(fault),
        }
    }

    fn parse_judgement(&self, text: &str) -> Result<Result<ParsedJudgement, Rejection>, PluginFault> {
        let fault = |message: String| self.named("answer", text, &self.caller.invalid_result(message));
        let parsed = self.caller.call("prompts.parse-judgement", CallSize::of(1), |guest| {
            self.caller.exports.contract.parse_judgement(guest, text)
        });
        match parsed.map_err(|error| self.named("answer", text, &error))? {
            Ok(judged) if !(0.0..=5.0).contains(&judged.score) => {
                Err(fault(format!("returned the score {}; expected 0 to 5, or a rejection", judged.score)))
            }
            Ok(judged) => Ok(Ok(judged)),
            Err(rejection) => self.caller.rejection(rejection).map(Err).map_err(fault),
        }
    }

    fn title(&self) -> &str {
        &self.caller.title
    }
}
