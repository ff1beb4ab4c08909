//! Names of classes, as `config.json` and `label_mapping.json` have them.

use crate::ModelError;
use crate::checkpoint::required;
use crate::export::{read_json, write_json};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

const MAPPING_FILE: &str = "label_mapping.json";

/// Class names, indexed by class id and all different.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Labels {
    names: Vec<String>,
    english: Option<Vec<String>>,
}

impl Labels {
    /// Makes labels of at least two class names; `english`: an English name for each, or `None`.
    ///
    /// # Errors
    /// Fewer than two names, an empty or repeated name, or another number of English names.
    pub fn new(names: Vec<String>, english: Option<Vec<String>>) -> Result<Self, String> {
        if names.len() < 2 {
            return Err(format!("{} labels; a classifier needs two at least", names.len()));
        }
        for list in [Some(&names), english.as_ref()].into_iter().flatten() {
            let repeated =
                list.iter().enumerate().find(|(index, name)| name.is_empty() || list[..*index].contains(name));
            if let Some((index, name)) = repeated {
                return Err(format!("label `{name}` of id {index} is empty or stands there twice"));
            }
        }
        match &english {
            Some(english) if english.len() != names.len() => {
                Err(format!("{} labels and {} English ones; expected as many of each", names.len(), english.len()))
            }
            _ => Ok(Self { names, english }),
        }
    }

    /// Class names, indexed by class id.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// English class names, indexed by class id; `None` if there are none.
    pub fn english(&self) -> Option<&[String]> {
        self.english.as_deref()
    }

    /// Number of classes.
    pub fn n_classes(&self) -> usize {
        self.names.len()
    }

    /// The class id of a name, in either language.
    pub fn id(&self, name: &str) -> Option<usize> {
        let of = |names: &[String]| names.iter().position(|own| own == name);
        of(&self.names).or_else(|| of(self.english.as_ref()?))
    }

    /// True if the folder has a `label_mapping.json`.
    pub(super) fn are_in(directory: &Path) -> bool {
        directory.join(MAPPING_FILE).is_file()
    }

    /// Reads the labels of a folder: from `label_mapping.json`, or else from `id2label` of `config.json`.
    pub(super) fn read(directory: &Path) -> Result<Self, ModelError> {
        let (mapping, config) = (directory.join(MAPPING_FILE), directory.join("config.json"));
        let of_config = |path: &Path| {
            let names = of_ids(&read_json(path)?["id2label"], "id2label");
            names.map_err(|message| ModelError::bad_file(path, message))
        };
        if !mapping.is_file() {
            let path = required(directory, "config.json")?;
            let missing =
                "no `id2label` there; a classifier names its classes in `label_mapping.json` or `config.json`";
            let names = of_config(&path)?.ok_or_else(|| ModelError::bad_file(&path, missing))?;
            return Self::new(names, None).map_err(|message| ModelError::bad_file(&path, message));
        }
        let file = read_json(&mapping)?;
        let bad = |message: String| ModelError::bad_file(&mapping, message);
        let names = of_ids(&file["id_to_label"], "id_to_label")
            .map_err(bad)?
            .ok_or_else(|| bad("no `id_to_label` there; expected the name of each id".into()))?;
        if config.is_file() {
            agree(&names, of_config(&config)?.as_deref()).map_err(bad)?;
        }
        let english = of_ids(&file["id_to_label_english"], "id_to_label_english").map_err(bad)?;
        Self::new(names, english).map_err(bad)
    }

    /// Writes `label_mapping.json`: `id_to_label`, `label_to_id`, and English names, if any.
    pub(super) fn write(&self, directory: &Path) -> Result<(), ModelError> {
        let mut file = json!({ "id_to_label": self.id_to_label(), "label_to_id": self.label_to_id() });
        if let Some(english) = &self.english {
            file["id_to_label_english"] = by_id(english);
        }
        write_json(&directory.join(MAPPING_FILE), &file)
    }

    /// JSON object of class names by class id.
    pub(super) fn id_to_label(&self) -> Value {
        by_id(&self.names)
    }

    pub(super) fn label_to_id(&self) -> Value {
        let ids = self.names.iter().enumerate().map(|(id, name)| (name.clone(), id.into()));
        Value::Object(ids.collect::<Map<String, Value>>())
    }
}

/// Refuses names that differ from those in `config.json`, unless the latter are transformers' placeholders `LABEL_0` and so on.
fn agree(names: &[String], of_config: Option<&[String]>) -> Result<(), String> {
    let Some(others) = of_config.filter(|others| others.iter().any(|name| !name.starts_with("LABEL_"))) else {
        return Ok(());
    };
    let differs = |id: &usize| names.get(*id) != others.get(*id);
    match (0..names.len().max(others.len())).find(differs) {
        None => Ok(()),
        Some(id) => {
            let name = |list: &[String]| list.get(id).map_or("nothing".to_owned(), |name| format!("`{name}`"));
            let (own, other) = (name(names), name(others));
            Err(format!("id {id} is {own} here and {other} in `config.json`; expected the same"))
        }
    }
}

fn by_id(names: &[String]) -> Value {
    let names = names.iter().enumerate().map(|(id, name)| (id.to_string(), Value::String(name.clone())));
    Value::Object(names.collect::<Map<String, Value>>())
}

fn of_ids(value: &Value, key: &str) -> Result<Option<Vec<String>>, String> {
    let Some(object) = value.as_object() else { return Ok(None) };
    let mut names: BTreeMap<usize, String> = BTreeMap::new();
    for (id, name) in object {
        let id_number: usize =
            id.parse().map_err(|_| format!("`{key}` has the id `{id}`; expected a number from 0"))?;
        let name = name.as_str().ok_or_else(|| format!("`{key}` has no text for id {id}"))?;
        names.insert(id_number, name.to_owned());
    }
    match names.keys().copied().eq(0..object.len()) {
        true => Ok(Some(names.into_values().collect())),
        false => Err(format!("`{key}` has ids that are not 0 to {}", object.len().saturating_sub(1))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels() -> Labels {
        let names = |names: [&str; 2]| names.map(String::from).to_vec();
        Labels::new(names(["售前", "售后"]), Some(names(["sales_oriented", "after_sales"]))).unwrap()
    }

    #[test]
    fn labels_are_read_as_they_were_written_and_found_by_either_name() {
        let folder = tempfile::tempdir().unwrap();
        labels().write(folder.path()).unwrap();
        assert_eq!(Labels::read(folder.path()).unwrap(), labels());
        assert_eq!((labels().id("售后"), labels().id("sales_oriented"), labels().id("诚实")), (Some(1), Some(0), None));
    }

    #[test]
    fn files_that_name_classes_differently_are_refused_and_made_up_names_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        labels().write(folder.path()).unwrap();
        let config = |text: &str| std::fs::write(folder.path().join("config.json"), text).unwrap();
        config(r#"{"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}"#);
        assert_eq!(Labels::read(folder.path()).unwrap(), labels());
        config(r#"{"id2label": {"0": "售后", "1": "售前"}}"#);
        let error = Labels::read(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("id 0 is `售前` here and `售后` in `config.json`; expected the same"), "{error}");
    }

    #[test]
    fn ids_that_leave_a_gap_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(MAPPING_FILE), r#"{"id_to_label": {"0": "a", "2": "b"}}"#).unwrap();
        let error = Labels::read(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("`id_to_label` has ids that are not 0 to 1"), "{error}");
        assert!(Labels::new(vec!["a".into(), "a".into()], None).unwrap_err().contains("twice"));
        assert!(Labels::new(vec!["a".into()], None).unwrap_err().contains("two at least"));
    }
}
