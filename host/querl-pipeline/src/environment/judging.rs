//! How a judge is asked and understood: a score for each rewrite, or a comparison of two; one attempt at repair where an answer
//! cannot be read.

use super::calls::{self, Missed};
use super::comparison::{Compared, Comparison, Pair};
use super::memo::Question;
use querl_core::ports::{Judge, JudgeRequest, PluginFault, PromptInput, PromptTask, Prompts};
use querl_core::records::{CallFailure, FailureKind, Judgement, Message};
use std::time::Duration;

/// What the judge is asked.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum JudgingForm {
    /// A score for each rewrite by itself.
    #[default]
    Score,
    /// Which of two is better.
    Compare(Comparison),
}

/// What a judge said to one question.
#[derive(Debug, Clone, PartialEq)]
pub struct Said {
    /// Of the rewrite that was asked about.
    pub judgement: Judgement,
    /// Of the one that it was compared with.
    pub of_other: Option<Judgement>,
}

/// Who is asked, and how.
pub struct Asking<'a> {
    /// The judge.
    pub judge: &'a dyn Judge,
    /// The tenant's prompt and parser.
    pub prompts: &'a dyn Prompts,
    /// What is asked.
    pub form: &'a JudgingForm,
    /// For each call.
    pub deadline: Option<Duration>,
}

/// A judgement, or why it cannot be read.
type Parsed = Result<Said, String>;

impl Asking<'_> {
    /// The answer to one question.
    ///
    /// # Errors
    /// A plugin broke its contract. That the judge failed is in the result.
    pub async fn ask(&self, question: &Question<'_>) -> Result<Result<Said, Missed>, PluginFault> {
        match (self.form, question.against) {
            (JudgingForm::Compare(comparison), Some(against)) => self.compare(comparison, question, against).await,
            _ => self.score(question).await,
        }
    }

    async fn score(&self, question: &Question<'_>) -> Result<Result<Said, Missed>, PluginFault> {
        let (query, context) = (question.query.original_query.as_str(), question.context);
        let input = PromptInput { query, context, rewrite: Some(question.rewrite) };
        let messages = self.prompts.messages(PromptTask::Judge, &input)?;
        let parse = |text: &str| -> Result<Parsed, PluginFault> {
            let parsed = self.prompts.parse_judgement(text)?;
            let judgement = parsed.map(|parsed| Judgement::Scored { score: parsed.score, reason: parsed.reason });
            Ok(judgement.map(|judgement| Said { judgement, of_other: None }).map_err(|rejection| rejection.to_string()))
        };
        self.converse(question, messages, parse).await
    }

    async fn compare(
        &self,
        comparison: &Comparison,
        question: &Question<'_>,
        baseline: &str,
    ) -> Result<Result<Said, Missed>, PluginFault> {
        let (query_id, query) = (question.query.id.as_str(), question.query.original_query.as_str());
        let pair = Pair { query_id, query, context: question.context, policy: question.rewrite, baseline };
        let said = |compared: Compared| Said { judgement: compared.policy, of_other: Some(compared.baseline) };
        if pair.policy == pair.baseline {
            return Ok(Ok(said(comparison.of_equals())));
        }
        let first = comparison.first(&pair);
        self.converse(question, comparison.messages(&pair), |text| Ok(comparison.parse(text, first).map(said))).await
    }

    /// Asks; where the answer cannot be read, shows it to the judge once and asks for the form again.
    async fn converse(
        &self,
        question: &Question<'_>,
        messages: Vec<Message>,
        parse: impl Fn(&str) -> Result<Parsed, PluginFault>,
    ) -> Result<Result<Said, Missed>, PluginFault> {
        let first = match self.call(question, &messages).await {
            Ok(text) => text,
            Err(missed) => return Ok(Err(missed)),
        };
        let problem = match parse(&first)? {
            Ok(said) => return Ok(Ok(said)),
            Err(problem) => problem,
        };
        let repair = [messages.clone(), repair(first, &problem)].concat();
        let second = match self.call(question, &repair).await {
            Ok(text) => text,
            Err(missed) => return Ok(Err(missed)),
        };
        Ok(parse(&second)?.map_err(|problem| {
            self.judge.forget(&messages);
            self.judge.forget(&repair);
            let message = format!(
                "the answer of judge {} holds no judgement, nor does a second one: {problem}",
                self.judge.name()
            );
            Missed::Failed(CallFailure { kind: FailureKind::InvalidResponse, message })
        }))
    }

    async fn call(&self, question: &Question<'_>, messages: &[Message]) -> Result<String, Missed> {
        let (query, context, rewrite) = (question.query.original_query.as_str(), question.context, question.rewrite);
        let request = JudgeRequest { query, context, rewrite, messages };
        calls::within(self.deadline, self.judge.judge(request)).await.map(|completion| completion.text)
    }
}

/// What is added to the conversation after an answer that cannot be read.
fn repair(answer: String, problem: &str) -> Vec<Message> {
    let again = format!("上面的回答无法解析（{problem}）。请严格按照要求的格式重新回答，不要输出其他内容。");
    vec![Message { role: "assistant".into(), content: answer }, Message { role: "user".into(), content: again }]
}
