//! Judging: sampling of the episodes to judge, scores of single rewrites or comparisons of two, and a second request if the judge's
//! response cannot be parsed.
//!
//! Judges prefer what they read first, or last. Which side of a comparison is first is drawn by seed, query and rewrites, so that the
//! preference cancels over many requests, and the same request always has the same order.

use super::calls::{self, CallError, CallKey};
use querl_core::config::{JudgeConfig, JudgeKind};
use querl_core::fsx::digest_hex;
use querl_core::ports::{Judge, JudgeRequest, PluginFault, PromptInput, PromptTask, Prompts};
use querl_core::records::{CallFailure, Context, FailureKind, Judgement, Message};
use querl_core::text::printable;
use serde_json::Value;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Judging {
    None,
    Share(f64),
}

impl Judging {
    pub(crate) fn of(config: &JudgeConfig) -> Self {
        match config.kind {
            JudgeKind::None => Self::None,
            _ => Self::Share(config.sample_rate),
        }
    }

    /// Whether the episode with this id is judged.
    pub(crate) fn samples(self, id: &str) -> bool {
        match self {
            Self::None => false,
            Self::Share(share) => position(id) < share,
        }
    }
}

/// A number in 0 to 1 for an id: uniformly distributed, and the same on every machine.
fn position(id: &str) -> f64 {
    let digest = digest_hex(id.as_bytes());
    let leading = u32::from_str_radix(&digest[..8], 16).expect("a digest is hexadecimal");
    f64::from(leading) / (f64::from(u32::MAX) + 1.0)
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) enum JudgingForm {
    #[default]
    Score,
    Compare(Comparison),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JudgeResponse {
    pub judgement: Judgement,
    /// Judgement of the teacher's rewrite, from a comparison; `None` if the judge scores single rewrites.
    pub of_baseline: Option<Judgement>,
}

pub(crate) struct JudgePrompter<'a> {
    pub judge: &'a dyn Judge,
    pub prompts: &'a dyn Prompts,
    pub form: &'a JudgingForm,
    pub deadline: Option<Duration>,
}

/// A judgement, or the reason why it cannot be parsed.
type Parsed = Result<JudgeResponse, String>;

impl JudgePrompter<'_> {
    pub(crate) async fn ask(&self, call: &CallKey<'_>) -> Result<Result<JudgeResponse, CallError>, PluginFault> {
        match (self.form, call.against) {
            (JudgingForm::Compare(comparison), Some(against)) => self.compare(comparison, call, against).await,
            _ => self.score(call).await,
        }
    }

    async fn score(&self, call: &CallKey<'_>) -> Result<Result<JudgeResponse, CallError>, PluginFault> {
        let (query, context) = (call.query.original_query.as_str(), call.context);
        let input = PromptInput { query, context, rewrite: Some(call.rewrite) };
        let messages = self.prompts.messages(PromptTask::Judge, &input)?;
        let parse = |text: &str| -> Result<Parsed, PluginFault> {
            let parsed = self.prompts.parse_judgement(text)?;
            let judgement = parsed.map(|parsed| Judgement::Scored { score: parsed.score, reason: parsed.reason });
            Ok(judgement
                .map(|judgement| JudgeResponse { judgement, of_baseline: None })
                .map_err(|rejection| rejection.to_string()))
        };
        self.converse(call, messages, parse).await
    }

    async fn compare(
        &self,
        comparison: &Comparison,
        call: &CallKey<'_>,
        baseline: &str,
    ) -> Result<Result<JudgeResponse, CallError>, PluginFault> {
        let (query_id, query) = (call.query.id.as_str(), call.query.original_query.as_str());
        let pair = Pair { query_id, query, context: call.context, policy: call.rewrite, baseline };
        if pair.policy == pair.baseline {
            return Ok(Ok(comparison.tie()));
        }
        let first = comparison.first(&pair);
        self.converse(call, comparison.messages(&pair), |text| Ok(comparison.parse(text, first))).await
    }

    /// Calls the judge. If the response cannot be parsed, calls it once more with that response and the required form.
    async fn converse(
        &self,
        call: &CallKey<'_>,
        messages: Vec<Message>,
        parse: impl Fn(&str) -> Result<Parsed, PluginFault>,
    ) -> Result<Result<JudgeResponse, CallError>, PluginFault> {
        let first = match self.send(call, &messages).await {
            Ok(text) => text,
            Err(error) => return Ok(Err(error)),
        };
        let problem = match parse(&first)? {
            Ok(response) => return Ok(Ok(response)),
            Err(problem) => problem,
        };
        let repair = [messages.clone(), repair(first, &problem)].concat();
        let second = match self.send(call, &repair).await {
            Ok(text) => text,
            Err(error) => return Ok(Err(error)),
        };
        Ok(parse(&second)?.map_err(|problem| {
            self.judge.forget(&messages);
            self.judge.forget(&repair);
            let message = format!(
                "the response of judge {} contains no judgement, nor does a second one: {problem}; {} was given `{}`",
                self.judge.name(),
                match self.form {
                    JudgingForm::Score =>
                        format!("`parse-judgement` of plugin {} (judge.form = \"score\")", self.prompts.title()),
                    JudgingForm::Compare(_) => "judge.form = \"compare\", which expects a JSON object,".to_owned(),
                },
                printable(&second, SHOWN_BYTES)
            );
            CallError::Failed(CallFailure { kind: FailureKind::InvalidResponse, message })
        }))
    }

    async fn send(&self, call: &CallKey<'_>, messages: &[Message]) -> Result<String, CallError> {
        let (query, context, rewrite) = (call.query.original_query.as_str(), call.context, call.rewrite);
        let request = JudgeRequest { query, context, rewrite, messages };
        calls::within(self.deadline, self.judge.judge(request)).await.map(|completion| completion.text)
    }
}

/// Maximum number of bytes of a response in a message.
const SHOWN_BYTES: usize = 200;

/// The messages that follow a response that cannot be parsed.
fn repair(answer: String, problem: &str) -> Vec<Message> {
    let again = format!("上面的回答无法解析（{problem}）。请严格按照要求的格式重新回答，不要输出其他内容。");
    vec![Message { role: "assistant".into(), content: answer }, Message { role: "user".into(), content: again }]
}

/// Score of a side in one dimension; rewards expect 0 to 5.
const BETTER: f64 = 5.0;
const SAME: f64 = 2.5;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Comparison {
    pub dimensions: Vec<String>,
    pub seed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pair<'a> {
    pub query_id: &'a str,
    pub query: &'a str,
    pub context: &'a Context,
    pub policy: &'a str,
    pub baseline: &'a str,
}

/// The side, policy or teacher, whose rewrite is first in the prompt of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum First {
    Policy,
    Baseline,
}

impl Comparison {
    pub(crate) fn first(&self, pair: &Pair<'_>) -> First {
        let drawn =
            digest_hex(format!("{}\n{}\n{}\n{}", self.seed, pair.query_id, pair.policy, pair.baseline).as_bytes());
        if drawn.ends_with(['0', '2', '4', '6', '8', 'a', 'c', 'e']) { First::Policy } else { First::Baseline }
    }

    pub(crate) fn tie(&self) -> JudgeResponse {
        let same = || Judgement::Scored { score: SAME, reason: "两个改写相同".into() };
        JudgeResponse { judgement: same(), of_baseline: Some(same()) }
    }

    pub(crate) fn messages(&self, pair: &Pair<'_>) -> Vec<Message> {
        let (one, other) = match self.first(pair) {
            First::Policy => (pair.policy, pair.baseline),
            First::Baseline => (pair.baseline, pair.policy),
        };
        let fields: String = self.dimensions.iter().map(|dimension| format!("\"{dimension}\": \"...\", ")).collect();
        let system = format!(
            "你是Query改写评审专家。同一个用户查询有甲、乙两个改写，请逐个维度比较哪个更好：{}。\n\
             每个维度只能回答「甲」「乙」「相同」「都差」之一：两者一样好答「相同」，两者都不合格答「都差」。\n\
             只输出JSON：{{{fields}\"理由\": \"...\"}}",
            self.dimensions.join("、"),
        );
        let mut user = format!("原始查询: {}\n", pair.query);
        for (label, text) in [("用户画像", &pair.context.user_profile), ("历史摘要", &pair.context.history_summary)]
        {
            if !text.is_empty() {
                user.push_str(&format!("{label}: {text}\n"));
            }
        }
        user.push_str(&format!("甲: {one}\n乙: {other}"));
        let message = |role: &str, content| Message { role: role.into(), content };
        vec![message("system", system), message("user", user)]
    }

    pub(crate) fn parse(&self, text: &str, first: First) -> Result<JudgeResponse, String> {
        let answer = object_in(text).ok_or("no JSON object in the response")?;
        let (mut one, mut other) = (0.0, 0.0);
        for dimension in &self.dimensions {
            let word = answer.get(dimension).and_then(Value::as_str);
            let word = word.ok_or_else(|| format!("the response has no verdict on `{dimension}`"))?;
            let (of_one, of_other) =
                points(word).ok_or_else(|| format!("`{dimension}` is `{word}`; expected 甲, 乙, 相同 or 都差"))?;
            one += of_one;
            other += of_other;
        }
        let n = self.dimensions.len() as f64;
        let reason = answer.get("理由").and_then(Value::as_str).unwrap_or_default();
        let scored = |sum: f64| Judgement::Scored { score: sum / n, reason: reason.to_owned() };
        let (policy, baseline) = if first == First::Policy { (one, other) } else { (other, one) };
        Ok(JudgeResponse { judgement: scored(policy), of_baseline: Some(scored(baseline)) })
    }
}

/// The JSON object in a text, which may have other words or a code fence around it.
fn object_in(text: &str) -> Option<Value> {
    let (start, end) = (text.find('{')?, text.rfind('}')?);
    serde_json::from_str(text.get(start..=end)?).ok()
}

/// Scores of the first and of the second rewrite.
fn points(word: &str) -> Option<(f64, f64)> {
    let word = word.trim().trim_matches(['「', '」', '"', '。']).to_lowercase();
    match word.as_str() {
        "甲" | "a" | "甲更好" => Some((BETTER, 0.0)),
        "乙" | "b" | "乙更好" => Some((0.0, BETTER)),
        "相同" | "一样" | "same" | "tie" => Some((SAME, SAME)),
        "都差" | "都不好" | "both_bad" | "both bad" => Some((0.0, 0.0)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_of_episodes_is_judged_and_always_the_same() {
        let sampled = |share| (0..2000).filter(|n| Judging::Share(share).samples(&format!("step-1/{n}/0"))).count();
        assert_eq!(sampled(0.3), sampled(0.3));
        assert!((540..660).contains(&sampled(0.3)), "{}", sampled(0.3));
        assert_eq!((sampled(0.0), sampled(1.0)), (0, 2000));
    }

    fn comparison() -> Comparison {
        Comparison { dimensions: vec!["意图准确".into(), "便于检索".into()], seed: 42 }
    }

    fn pair<'a>(context: &'a Context, policy: &'a str) -> Pair<'a> {
        Pair { query_id: "q", query: "怎么吃", context, policy, baseline: "鱼油 用法" }
    }

    fn scores(response: &JudgeResponse) -> (f64, f64) {
        (response.judgement.score().unwrap(), response.of_baseline.as_ref().unwrap().score().unwrap())
    }

    #[test]
    fn points_go_to_the_side_that_the_judge_meant() {
        let text = "好的：```json\n{\"意图准确\": \"甲\", \"便于检索\": \"相同\", \"理由\": \"更全\"}\n```";
        let of = |first| scores(&comparison().parse(text, first).unwrap());
        assert_eq!((of(First::Policy), of(First::Baseline)), ((3.75, 1.25), (1.25, 3.75)));
        let text = "{\"意图准确\": \"都差\", \"便于检索\": \"「乙」\"}";
        assert_eq!(scores(&comparison().parse(text, First::Policy).unwrap()), (0.0, 2.5));
    }

    #[test]
    fn missing_or_odd_answers_are_named() {
        let said = |text: &str| comparison().parse(text, First::Policy).unwrap_err();
        assert_eq!(said("甲更好"), "no JSON object in the response");
        assert_eq!(said("{\"意图准确\": \"甲\"}"), "the response has no verdict on `便于检索`");
        let odd = said("{\"意图准确\": \"也许\", \"便于检索\": \"甲\"}");
        assert_eq!(odd, "`意图准确` is `也许`; expected 甲, 乙, 相同 or 都差");
    }

    #[test]
    fn each_side_is_first_in_half_of_the_comparisons_and_always_the_same() {
        let (comparison, context) = (comparison(), Context::default());
        let rewrites: Vec<String> = (0..1000).map(|n| format!("改写 {n}")).collect();
        let n_first = |comparison: &Comparison| {
            rewrites.iter().filter(|text| comparison.first(&pair(&context, text)) == First::Policy).count()
        };
        assert!((430..570).contains(&n_first(&comparison)), "{}", n_first(&comparison));
        let reseeded = Comparison { seed: 43, ..comparison.clone() };
        assert!(
            rewrites
                .iter()
                .any(|text| reseeded.first(&pair(&context, text)) != comparison.first(&pair(&context, text)))
        );
        let pair = pair(&context, "鱼油 怎么服用");
        let user = &comparison.messages(&pair)[1].content;
        let stands_first = user.contains("甲: 鱼油 怎么服用");
        assert_eq!(stands_first, comparison.first(&pair) == First::Policy);
    }

    /// A judge that always prefers the first side has no effect on average.
    #[test]
    fn preference_for_a_place_cancels() {
        let (comparison, context) = (comparison(), Context::default());
        let answer = "{\"意图准确\": \"甲\", \"便于检索\": \"甲\"}";
        let difference = |n: usize| {
            let policy = format!("改写 {n}");
            let first = comparison.first(&pair(&context, &policy));
            let (own, teachers) = scores(&comparison.parse(answer, first).unwrap());
            own - teachers
        };
        let mean = (0..2000).map(difference).sum::<f64>() / 2000.0;
        assert!(mean.abs() < 0.4, "{mean}");
    }
}
