//! Cross-validation: a training for each part that is held out. Of parts that are done the answers are kept, so that the same command goes
//! on behind them.

use crate::fitting::{Resume, Rows, Sides, Trainer};
use crate::measured::{Asked, Measured, Said};
use crate::model::ask;
use crate::results::{Judged, write};
use crate::train::sides;
use anyhow::Context;
use querl_core::fsx::digest_hex;
use querl_eval::classification::{Fold, FoldSettings, folds};
use serde::{Deserialize, Serialize};
use std::path::Path;

const FOLDER: &str = "training/folds";

/// What the classifier of one part said of it.
#[derive(Debug, Serialize, Deserialize)]
struct Answered {
    /// SHA-256 of all that the answers depend on.
    key: String,
    logits: Vec<Vec<f64>>,
    /// Fitted on this training's own dev.
    temperature: Option<f64>,
    n_shortened: usize,
}

impl Measured<'_> {
    /// Figures of trainings that each had another part held out.
    pub(crate) fn by_folds(&self, trainer: &Trainer<'_>) -> anyhow::Result<String> {
        let Asked { config, corpus, .. } = self.asked;
        let all: Vec<usize> = (0..corpus.len()).collect();
        let (labels, groups) = corpus.of(&all);
        let (n_folds, n_repeats) = (config.num_folds.unwrap_or(2) as usize, config.num_repeats as usize);
        let parts = folds(&labels, &groups, FoldSettings { n_folds, n_repeats, seed: config.seed });
        let folder = config.output_dir.join(FOLDER);
        std::fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
        let (mut indices, mut all_said, mut n_without) = (Vec::new(), Said::default(), 0);
        for (number, fold) in parts.iter().enumerate() {
            trainer.reporter().message(&format!("part {} of {}", number + 1, parts.len()));
            n_without += usize::from(!corpus.missing(&fold.train).is_empty());
            let answered = self.answered(trainer, fold, &folder.join(format!("part-{:03}.json", number + 1)))?;
            let said = self.asked.said(&answered.logits, answered.temperature, [&fold.train, &fold.test]);
            all_said.model.extend(said.model);
            all_said.calibrated.extend(said.calibrated);
            all_said.baseline.extend(said.baseline);
            all_said.n_shortened += answered.n_shortened;
            indices.extend_from_slice(&fold.test);
        }
        let mut notes = vec![format!(
            "cross-validation: {n_folds} parts, {n_repeats} round(s); figures are of those trainings, the written model is of another one"
        )];
        if !all_said.calibrated.is_empty() {
            notes.push("calibrated figures are by a temperature for each training, fitted on its own dev".into());
        }
        if n_without > 0 {
            let n = parts.len();
            notes.push(format!(
                "{n_without} of {n} trainings had no example of some class: all were in the held-out part"
            ));
        }
        let majority = corpus.majority(&all);
        let judged = Judged { corpus, indices: &indices, n_repeats, majority, seed: config.seed };
        self.tell(&judged, &all_said, notes)
    }

    /// Trains without a part and asks about it, unless that was done before.
    fn answered(&self, trainer: &Trainer<'_>, fold: &Fold, file: &Path) -> anyhow::Result<Answered> {
        let Asked { config, corpus, tokenizer } = self.asked;
        let work = tempfile::tempdir()?;
        let sides: Sides = sides(config, corpus, fold.train.clone());
        let rows = Rows::of(corpus, tokenizer, &sides, (config, work.path()))?;
        let texts = self.asked.texts(&fold.test);
        let (training, length) = (trainer.fingerprint(&corpus.classes, &rows, None), config.max_length);
        let key = digest_hex(format!("{training} {length} {texts:?}").as_bytes());
        let known = std::fs::read_to_string(file).ok().and_then(|text| serde_json::from_str::<Answered>(&text).ok());
        if let Some(known) = known.filter(|known| known.key == key && known.logits.len() == texts.len()) {
            return Ok(known);
        }
        // A part is short: what is left of it when it is stopped is not worth the weights on disk.
        let fitted = trainer.fit(corpus.classes.clone(), &rows, None, (work.path(), Resume::Never))?;
        let answers = ask(&fitted.classifier, tokenizer, &texts, config.tokens_asked())?;
        let temperature = self.asked.temperature(&fitted.classifier, &sides.dev)?;
        let answered = Answered { key, logits: answers.logits, temperature, n_shortened: answers.n_shortened };
        write(file, &serde_json::to_string(&answered)?)?;
        Ok(answered)
    }
}
