//! Responses of the policy as edits of the query (`data.rewrite_form = "edit"`): a small model need not copy a query to keep it.
//!
//! ```text
//! =            the query
//! + TEXT       the query, then TEXT
//! TEXT         TEXT
//! ```

use crate::config::RewriteForm;
use crate::ports::{PluginFault, Prompts};
use crate::records::Rejection;

/// A response that keeps the query.
pub const KEEP: &str = "=";
/// What a response that adds to the query begins with.
pub const APPEND: &str = "+";

/// How to read an edit, as part of a sentence.
pub const HOW_TO_READ: &str =
    "`=` keeps the query, `+ TEXT` adds to it, other text replaces it (docs/data.md, \"Edits of the query\")";

/// The response that adds `text` to the query.
pub fn append(text: &str) -> String {
    format!("{APPEND} {text}")
}

/// The search text of a query and what is added to it.
pub fn appended(query: &str, text: &str) -> String {
    format!("{query} {text}")
}

/// Whether a rewrite has no marker of an edit: as an answer, it would be read as itself.
pub fn is_plain(text: &str) -> bool {
    text.trim() != KEEP && !text.trim_start().starts_with(APPEND)
}

/// The rewrite in a response to `query`, parsed by the prompt plugin. A marker may also be behind what the plugin removes, such as
/// thinking, quotes or list marks.
///
/// # Errors
/// The plugin broke its contract; the inner error is its rejection of the response.
pub fn read_rewrite(
    form: RewriteForm,
    prompts: &dyn Prompts,
    query: &str,
    response: &str,
) -> Result<Result<String, Rejection>, PluginFault> {
    let text = response.trim_start();
    match form {
        RewriteForm::Edit if text.trim_end() == KEEP => Ok(Ok(query.to_owned())),
        RewriteForm::Edit if text.starts_with(APPEND) => {
            let added = prompts.parse_rewrite(text[APPEND.len()..].trim_start())?;
            Ok(added.map(|added| appended(query, &added)))
        }
        RewriteForm::Edit => Ok(prompts.parse_rewrite(response)?.and_then(|parsed| edited(query, parsed))),
        RewriteForm::Full => prompts.parse_rewrite(response),
    }
}

/// The rewrite that a parsed response stands for.
fn edited(query: &str, parsed: String) -> Result<String, Rejection> {
    let text = parsed.trim();
    match text.strip_prefix(APPEND).map(str::trim) {
        _ if text == KEEP => Ok(query.to_owned()),
        Some("") => Err(Rejection::by_host("empty_rewrite", "the response adds nothing to the query")),
        Some(added) => Ok(appended(query, added)),
        None => Ok(parsed),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::ports::{ParsedJudgement, PromptInput, PromptTask};
    use crate::records::Message;

    struct Trim;

    impl Prompts for Trim {
        fn messages(&self, _: PromptTask, _: &PromptInput<'_>) -> Result<Vec<Message>, PluginFault> {
            Ok(Vec::new())
        }

        fn parse_rewrite(&self, text: &str) -> Result<Result<String, Rejection>, PluginFault> {
            let text = text.trim().trim_start_matches("1. ").trim_matches('"').trim();
            Ok(if text.is_empty() { Err(Rejection::by_host("empty", "no text")) } else { Ok(text.to_owned()) })
        }

        fn parse_judgement(&self, _: &str) -> Result<Result<ParsedJudgement, Rejection>, PluginFault> {
            Ok(Err(Rejection::by_host("none", "no judge")))
        }
    }

    #[test]
    fn a_response_keeps_the_query_adds_to_it_or_replaces_it() {
        let read = |form, response| read_rewrite(form, &Trim, "怎么吃", response).unwrap().ok();
        for (response, edit, full) in [
            ("=", Some("怎么吃"), Some("=")),
            (" =\n", Some("怎么吃"), Some("=")),
            ("+ 食用方法", Some("怎么吃 食用方法"), Some("+ 食用方法")),
            ("+食用方法", Some("怎么吃 食用方法"), Some("+食用方法")),
            ("+ ", None, Some("+")),
            ("食用方法", Some("食用方法"), Some("食用方法")),
            ("= 食用方法", Some("= 食用方法"), Some("= 食用方法")),
            ("\"=\"", Some("怎么吃"), Some("=")),
            ("1. + 食用方法", Some("怎么吃 食用方法"), Some("+ 食用方法")),
            ("\"+ \"", None, Some("+")),
            ("", None, None),
        ] {
            assert_eq!(read(RewriteForm::Edit, response).as_deref(), edit, "{response:?}");
            assert_eq!(read(RewriteForm::Full, response).as_deref(), full, "{response:?}");
        }
        assert_eq!(read(RewriteForm::Edit, &append("用法")).unwrap(), appended("怎么吃", "用法"));
        let nothing = read_rewrite(RewriteForm::Edit, &Trim, "怎么吃", "\"+\"").unwrap().unwrap_err();
        assert_eq!(nothing.code, "empty_rewrite");
    }

    #[test]
    fn a_rewrite_with_a_marker_is_not_plain() {
        assert!(["食用方法", "= 食用方法", "a + b", ""].into_iter().all(is_plain));
        assert!(!["=", " =\n", "+", " + 食用方法"].into_iter().any(is_plain));
    }
}
