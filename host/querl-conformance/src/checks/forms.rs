//! A reward in both forms of its batches.

use super::{Broken, Found};
use crate::corpus::episodes;
use crate::report::grouped;
use crate::shown;
use crate::subject::{Batches, Subject};
use querl_core::ports::{FaultKind, PluginFault};
use querl_core::records::Episode;
use querl_plugin::{PluginError, RewardForm};

/// Each item of the corpus alone, and the ordinary ones as a batch: the same totals, components, codes and details, bit for bit.
pub(super) fn packed_equals_records(subject: &Subject<'_>) -> Found {
    let in_form = |form| subject.reward_in(form).map_err(|error: PluginError| Broken::error("check-settings", &error));
    let (packed, records) = (in_form(RewardForm::Packed)?, in_form(RewardForm::Records)?);
    let mut batches = vec![episodes::batch(64)];
    batches.extend(episodes::groups().into_iter().flat_map(|group| group.items).map(|item| vec![item]));
    for batch in &batches {
        same(batch, &packed.ask(batch), &records.ask(batch))?;
    }
    Ok(format!("{} batches in both forms", grouped(batches.len() as u64)))
}

type Answers = Result<Vec<String>, PluginFault>;

fn same(batch: &[Episode], packed: &Answers, records: &Answers) -> Result<(), Broken> {
    let differ = |item: &Episode, packed: &str, records: &str| {
        let sent = format!("packed and as records, a batch of {} with {}", batch.len(), shown::item(item));
        Err(Broken::new(sent, format!("packed {packed}, as records {records}")))
    };
    match (packed, records) {
        (Ok(packed), Ok(records)) => {
            let mut answers = batch.iter().zip(packed.iter().zip(records));
            match answers.find(|(_, (packed, records))| packed != records) {
                Some((item, (packed, records))) => differ(item, packed, records),
                None => Ok(()),
            }
        }
        // The forms cost different fuel and memory; other checks tell of a limit that is hit.
        (Err(fault), _) | (_, Err(fault)) if fault.kind == FaultKind::Limit => Ok(()),
        (Err(packed), Err(records)) if packed.kind == records.kind => Ok(()),
        (packed, records) => {
            let told = |answers: &Answers| match answers {
                Ok(answers) => answers[0].clone(),
                Err(fault) => fault.to_string(),
            };
            differ(&batch[0], &told(packed), &told(records))
        }
    }
}
