//! Answers that were paid for once: by query and rewrite, for the length of a run.

use querl_core::records::{CallFailure, Context, QueryRow};
use std::collections::HashMap;
use std::sync::Mutex;

/// Above so many answers the memo starts afresh, so that a long run does not fill the memory.
const MOST_ANSWERS: usize = 100_000;

/// A question about one rewrite of one query.
#[derive(Debug, Clone, PartialEq)]
pub struct Question<'a> {
    /// The query.
    pub query: &'a QueryRow,
    /// Who asks, and what was said before.
    pub context: &'a Context,
    /// The rewrite.
    pub rewrite: &'a str,
}

type Key = (String, String);

impl Question<'_> {
    fn key(&self) -> Key {
        (self.query.id.clone(), self.rewrite.to_owned())
    }
}

/// Successful answers. Failures are not kept: the next time is asked again.
#[derive(Debug)]
pub struct Memo<T> {
    known: Mutex<HashMap<Key, T>>,
}

impl<T> Default for Memo<T> {
    fn default() -> Self {
        Self { known: Mutex::default() }
    }
}

impl<T: Clone> Memo<T> {
    /// One answer per question, in order. `ask` is called at most once, with the questions that are new, each once.
    ///
    /// # Errors
    /// Those of `ask`.
    pub fn answer<'a, E>(
        &self,
        questions: &[Question<'a>],
        ask: impl FnOnce(&[Question<'a>]) -> Result<Vec<Result<T, CallFailure>>, E>,
    ) -> Result<Vec<Result<T, CallFailure>>, E> {
        let mut known = self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if known.len() > MOST_ANSWERS {
            known.clear();
        }
        let mut unasked: HashMap<Key, Question<'a>> = HashMap::new();
        let mut new = Vec::new();
        for question in questions {
            let key = question.key();
            if !known.contains_key(&key) && unasked.insert(key, question.clone()).is_none() {
                new.push(question.clone());
            }
        }
        let mut failures = HashMap::new();
        let answers = if new.is_empty() { Vec::new() } else { ask(&new)? };
        for (question, answer) in new.iter().zip(answers) {
            match answer {
                Ok(answer) => drop(known.insert(question.key(), answer)),
                Err(failure) => drop(failures.insert(question.key(), failure)),
            }
        }
        let find = |key: &Key| known.get(key).cloned().ok_or_else(|| failures[key].clone());
        Ok(questions.iter().map(|question| find(&question.key())).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::environment::testing::query;
    use querl_core::records::FailureKind;
    use std::convert::Infallible;

    fn ask_noting<'a>(
        asked: &mut Vec<String>,
        new: &[Question<'a>],
    ) -> Result<Vec<Result<usize, CallFailure>>, Infallible> {
        asked.extend(new.iter().map(|question| question.rewrite.to_owned()));
        Ok(new
            .iter()
            .map(|question| match question.rewrite {
                "down" => Err(CallFailure { kind: FailureKind::Timeout, message: "late".into() }),
                rewrite => Ok(rewrite.len()),
            })
            .collect())
    }

    #[test]
    fn each_question_is_asked_once_and_failures_again() {
        let (memo, row, context) = (Memo::default(), query("a"), Context::default());
        let question = |rewrite| Question { query: &row, context: &context, rewrite };
        let questions = ["one", "down", "one", "three"].map(question);
        let mut asked = Vec::new();
        let answers = memo.answer(&questions, |new| ask_noting(&mut asked, new)).unwrap();
        assert_eq!(asked, ["one", "down", "three"]);
        assert_eq!((&answers[0], &answers[2], &answers[3]), (&Ok(3), &Ok(3), &Ok(5)));
        assert!(answers[1].is_err());
        asked.clear();
        memo.answer(&questions, |new| ask_noting(&mut asked, new)).unwrap();
        assert_eq!(asked, ["down"]);
    }
}
