//! `data.dataset`: reads a dataset of ms-swift, TRL or verl as the query table, with prompt and completion of each row.

mod forms;
mod json_rows;
mod reader;

pub(crate) use reader::DatasetReader;

use super::formats::{CellForm, MAX_ROWS, RowSource, Table, TableCell, TypedRows};
use crate::error::DataError;
use forms::DatasetRecord;
use json_rows::open_json_rows;
use querl_core::config::DataConfig;
use querl_core::records::Split;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Rows with their numbers, which continue from file to file.
type Records = Box<dyn Iterator<Item = Result<(usize, DatasetRecord), DataError>>>;

/// The files of a dataset, read once without errors.
#[derive(Debug, Clone)]
pub(crate) struct DatasetFiles {
    files: Vec<DatasetFile>,
    /// Names of the columns of query, profile, history and gold ids, then those of all others.
    header: Vec<String>,
}

#[derive(Debug, Clone)]
struct DatasetFile {
    split: Split,
    path: PathBuf,
    /// Number of its last row.
    end: usize,
}

impl DatasetFiles {
    /// Opens the files of `data.dataset` and reads them once.
    ///
    /// # Errors
    /// A file cannot be read, a row has none of the known formats, or there is no row.
    pub(crate) fn open(config: &DataConfig) -> Result<Self, DataError> {
        let own = [&config.query_column, &config.profile_column, &config.history_column, &config.gold_column];
        let mut header: Vec<String> = own.into_iter().cloned().collect();
        let aliases = own.into_iter().filter_map(|name| DataConfig::other_name(name)).map(str::to_owned);
        let mut known: HashSet<String> = header.iter().cloned().chain(aliases).collect();
        let (mut files, mut end) = (Vec::new(), 0);
        for (split, path) in config.dataset.files() {
            for record in records_of(path)? {
                for (name, _) in record?.columns {
                    if known.insert(name.clone()) {
                        header.push(name);
                    }
                }
                end += 1;
            }
            if end > MAX_ROWS as usize {
                let problem = format!("the dataset has more than {MAX_ROWS} rows; divide it into several");
                return Err(DataError::file(path, problem));
            }
            files.push(DatasetFile { split, path: path.to_owned(), end });
        }
        let this = Self { files, header };
        match end {
            0 => Err(DataError::file(this.path(), "holds no row; expected a JSON object a line, or rows of parquet")),
            _ => Ok(this),
        }
    }

    /// The first file.
    fn path(&self) -> &Path {
        self.files.first().map_or(Path::new(""), |file| file.path.as_path())
    }

    /// The number of the last row of each file, with the split of its rows, in order.
    pub(crate) fn ends(&self) -> Vec<(usize, Split)> {
        self.files.iter().map(|file| (file.end, file.split)).collect()
    }

    pub(crate) fn table(self) -> Table {
        let (path, header) = (self.path().to_owned(), self.header.clone());
        Table::new(&path, header, Box::new(self))
    }

    fn records(&self) -> Result<Records, DataError> {
        let files = self.files.iter().map(|file| records_of(&file.path)).collect::<Result<Vec<_>, _>>()?;
        Ok(Box::new((1..).zip(files.into_iter().flatten()).map(|(row, record)| Ok((row, record?)))))
    }

    /// The cells of a row. A column of the dataset with the name of one of the first four stands for what the prompt says; a blank one
    /// is no query.
    fn cells(header: &[String], record: DatasetRecord) -> Vec<TableCell> {
        let DatasetRecord { texts, has_label, columns, .. } = record;
        let mut by_name: HashMap<String, TableCell> = columns.into_iter().collect();
        let (own, others) = header.split_at(texts.len());
        let own: Vec<TableCell> = own
            .iter()
            .zip(texts)
            .enumerate()
            .map(|(index, (name, text))| {
                let is_query = index == 0;
                let alias = || DataConfig::other_name(name).and_then(|alias| by_name.get(alias));
                let given = by_name
                    .get(name)
                    .or_else(alias)
                    .filter(|cell| !has_label && (!is_query || !cell.text.trim().is_empty()));
                given.cloned().unwrap_or_else(|| text.into())
            })
            .collect();
        own.into_iter().chain(others.iter().map(|name| by_name.remove(name).unwrap_or_default())).collect()
    }
}

fn records_of(path: &Path) -> Result<impl Iterator<Item = Result<DatasetRecord, DataError>> + use<>, DataError> {
    Ok(open_json_rows(path)?.map(|row| {
        let (location, row) = row?;
        forms::parse(row).map_err(|problem| location.error(problem))
    }))
}

impl RowSource for DatasetFiles {
    fn rows(self: Box<Self>, _: &[usize], _: CellForm) -> Result<TypedRows, DataError> {
        let records = self.records()?;
        let header = self.header;
        Ok(Box::new(records.map(move |record| {
            let (row, record) = record?;
            Ok((row, Self::cells(&header, record)))
        })))
    }
}

#[cfg(test)]
mod tests;
