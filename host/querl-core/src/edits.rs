//! Responses of the policy as edits of the query (`data.rewrite_form = "edit"`): a small model need not copy a query to keep it.
//!
//! ```text
//! =            the query
//! + TEXT       the query, then TEXT
//! &            the expansion of the query
//! & TEXT       the expansion of the query, then TEXT
//! TEXT         TEXT
//! ```
//!
//! The expansion of a query is the query and its history summary; in a run with learned expansions (`data.expansion_terms`), the text that was learned.

use crate::config::RewriteForm;
use crate::ports::{PluginFault, Prompts};
use crate::records::{QueryRow, Rejection};

/// Version of the edit syntax above. A new version makes the stages that read or write edits run again.
pub const VERSION: u32 = 2;

/// Response that keeps the query unchanged.
pub const KEEP: &str = "=";
/// Prefix of a response that appends a text to the query.
pub const APPEND: &str = "+";
/// Prefix of a response that stands for the expansion of the query: with the history summary, or as it was learned.
pub const EXPAND: &str = "&";

/// End of a message, without a full stop, that explains the syntax of responses and targets with `data.rewrite_form = "edit"`.
pub const ARE_EDITS: &str = "are edits of the query (data.rewrite_form = \"edit\"): `=` keeps the query, `+ TEXT` adds to it, `&` is the query with \
                             its history summary, or its learned expansion, `& TEXT` these and TEXT, other text replaces it (docs/data.md, \"Edits of the query\")";

/// The response that adds `text` to the query.
pub fn append(text: &str) -> String {
    format!("{APPEND} {text}")
}

/// The response that stands for the expansion of the query and `text`, which may be empty.
pub fn expand(text: &str) -> String {
    joined(&[EXPAND, text])
}

/// Joins the parts of a search text with spaces; empty parts are left out.
pub fn joined(parts: &[&str]) -> String {
    let parts: Vec<&str> = parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty()).collect();
    parts.join(" ")
}

/// Maximum number of characters of a history in a search text: the last ones, which are the latest turns.
const HISTORY_CHARS: usize = 500;

/// The part of a history that is searched: the last 500 characters, on one line, since a client of a server may send a whole dialogue.
pub fn recent_history(history: &str) -> String {
    let history = history.split_whitespace().collect::<Vec<_>>().join(" ");
    let n_left_out = history.chars().count().saturating_sub(HISTORY_CHARS);
    let start = history.char_indices().nth(n_left_out).map_or(history.len(), |(start, _)| start);
    history[start..].to_owned()
}

/// Search text of a query, its history summary and an added text.
pub fn with_history(query: &str, history: &str, added: &str) -> String {
    joined(&[query, &recent_history(history), added])
}

/// What edits are made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EditParts<'a> {
    /// The user's query.
    pub query: &'a str,
    /// Summary of the conversation before the query; may be empty.
    pub history: &'a str,
    /// Expansion of the query in a run with learned expansions; `None`: the query and its history.
    pub expansion: Option<&'a str>,
}

impl<'a> From<&'a QueryRow> for EditParts<'a> {
    fn from(row: &'a QueryRow) -> Self {
        Self { query: &row.original_query, history: &row.history_summary, expansion: row.expansion.as_deref() }
    }
}

impl EditParts<'_> {
    /// True if `&` is the query.
    pub fn is_query_alone(&self) -> bool {
        self.expansion.map_or(self.history.trim().is_empty(), |expansion| expansion.trim() == self.query.trim())
    }

    /// Search text of the expansion and an added text, which may be empty: `& TEXT`.
    pub fn expanded(&self, added: &str) -> String {
        match self.expansion {
            Some(expansion) => joined(&[expansion, added]),
            None => with_history(self.query, self.history, added),
        }
    }
}

/// True if a rewrite has no edit marker, so that as a response it is read as that rewrite.
pub fn is_plain(text: &str) -> bool {
    matches!(Edit::of(text), Edit::Replace(_))
}

/// Search text of a fine-tuning target for the query of `parts`.
///
/// # Errors
/// The target adds an empty text.
pub fn search_text(target: &str, parts: EditParts<'_>) -> Result<String, Rejection> {
    Edit::of(target).apply(parts)
}

/// Parses the rewrite in a response to the query of `parts` with the prompt plugin.
/// With [`RewriteForm::Edit`], a marker may also follow what the plugin removes, such as thinking, quotes or list marks.
///
/// # Errors
/// The plugin broke its contract; the inner error is its rejection of the response.
pub fn read_rewrite(
    form: RewriteForm,
    prompts: &dyn Prompts,
    parts: EditParts<'_>,
    response: &str,
) -> Result<Result<String, Rejection>, PluginFault> {
    if form == RewriteForm::Full {
        return prompts.parse_rewrite(response);
    }
    let edit = Edit::of(response);
    let text = match edit {
        // Without a text there is nothing for the plugin to parse.
        Edit::Keep | Edit::Expand("") => return Ok(edit.apply(parts)),
        Edit::Append(text) | Edit::Expand(text) | Edit::Replace(text) => text,
    };
    let parsed = prompts.parse_rewrite(text)?;
    Ok(parsed.and_then(|parsed| edit.with_text(&parsed).apply(parts)))
}

/// A parsed response, with the text after its marker.
enum Edit<'a> {
    Keep,
    Append(&'a str),
    Expand(&'a str),
    /// A complete rewrite, without a marker.
    Replace(&'a str),
}

impl<'a> Edit<'a> {
    fn of(response: &'a str) -> Self {
        let text = response.trim();
        let behind = |marker: &str| text.strip_prefix(marker).map(str::trim_start);
        match (behind(APPEND), behind(EXPAND)) {
            _ if text == KEEP => Self::Keep,
            (Some(added), _) => Self::Append(added),
            (_, Some(added)) => Self::Expand(added),
            _ => Self::Replace(response),
        }
    }

    /// The same edit with the parsed text, which may itself be an edit if there was no marker before.
    fn with_text<'b>(&self, text: &'b str) -> Edit<'b> {
        match self {
            Self::Append(_) => Edit::Append(text),
            Self::Expand(_) => Edit::Expand(text),
            Self::Keep | Self::Replace(_) => Edit::of(text),
        }
    }

    fn apply(self, parts: EditParts<'_>) -> Result<String, Rejection> {
        match self {
            Self::Keep => Ok(parts.query.to_owned()),
            Self::Append("") => Err(Rejection::by_host("empty_rewrite", "the response adds nothing to the query")),
            Self::Append(text) => Ok(joined(&[parts.query, text])),
            Self::Expand(text) => Ok(parts.expanded(text)),
            Self::Replace(text) => Ok(text.to_owned()),
        }
    }
}

#[cfg(test)]
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
        let parts = EditParts { query: "怎么吃", history: "问过鱼油", expansion: None };
        let read = |form, response| read_rewrite(form, &Trim, parts, response).unwrap().ok();
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
            ("&", Some("怎么吃 问过鱼油"), Some("&")),
            (" & 食用方法\n", Some("怎么吃 问过鱼油 食用方法"), Some("& 食用方法")),
            ("1. &食用方法", Some("怎么吃 问过鱼油 食用方法"), Some("&食用方法")),
            ("\"&\"", Some("怎么吃 问过鱼油"), Some("&")),
            ("", None, None),
        ] {
            assert_eq!(read(RewriteForm::Edit, response).as_deref(), edit, "{response:?}");
            assert_eq!(read(RewriteForm::Full, response).as_deref(), full, "{response:?}");
        }
        let (added, expanded_alone) = (append("用法"), expand(""));
        assert_eq!(read(RewriteForm::Edit, &added).unwrap(), "怎么吃 用法");
        assert_eq!(read(RewriteForm::Edit, &expanded_alone).unwrap(), "怎么吃 问过鱼油");
        let expanded = EditParts { expansion: Some("鱼油 剂量"), ..parts };
        let of_expanded = |response| read_rewrite(RewriteForm::Edit, &Trim, expanded, response).unwrap().unwrap();
        assert_eq!(of_expanded("&"), "鱼油 剂量");
        assert_eq!(of_expanded("& 用法"), "鱼油 剂量 用法");
        assert_eq!([of_expanded("="), of_expanded("+ 用法")], ["怎么吃", "怎么吃 用法"], "only `&` is the expansion");
        let alone = EditParts { history: "", ..parts };
        assert_eq!([alone.is_query_alone(), parts.is_query_alone()], [true, false]);
        assert!(!EditParts { history: "", ..expanded }.is_query_alone());
        assert!(EditParts { expansion: Some("怎么吃"), ..parts }.is_query_alone(), "no term was predicted");
        let without = read_rewrite(RewriteForm::Edit, &Trim, alone, "& 用法").unwrap().unwrap();
        assert_eq!(without, "怎么吃 用法", "no history");
        assert_eq!(search_text(&append("用法"), alone).unwrap(), "怎么吃 用法");
        let nothing = read_rewrite(RewriteForm::Edit, &Trim, alone, "\"+\"").unwrap().unwrap_err();
        assert_eq!(nothing.code, "empty_rewrite");
    }

    #[test]
    fn of_a_long_history_the_end_is_searched() {
        assert_eq!(with_history("怎么吃", "问过\n鱼油 ", "用法"), "怎么吃 问过 鱼油 用法");
        let text = with_history("怎么吃", &"鱼油".repeat(400), "");
        assert_eq!(text.chars().count(), "怎么吃 ".chars().count() + HISTORY_CHARS);
    }

    #[test]
    fn a_rewrite_with_a_marker_is_not_plain() {
        assert!(["食用方法", "= 食用方法", "a + b", ""].into_iter().all(is_plain));
        assert!(!["=", " =\n", "+", " + 食用方法", "&", "& 食用方法"].into_iter().any(is_plain));
    }
}
