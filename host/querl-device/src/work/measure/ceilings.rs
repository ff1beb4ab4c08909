//! What a device can do at best.

use super::nothing;
use crate::{Ceilings, JobError, Spread};
use querl_model::{Place, Repeated, copies, matrix_products};

/// Products and copies, in this run.
pub(super) fn measure(place: &Place) -> Result<Ceilings, JobError> {
    let rate =
        |of: &Repeated, amount: f64| Ok::<Spread, JobError>(Spread::of(&of.seconds).ok_or_else(nothing)?.rate(amount));
    let (products, copies) = (matrix_products(place)?, copies(place)?);
    Ok(Ceilings {
        matrix: rate(&products, 2.0 * (products.size as f64).powi(3))?,
        matrix_size: products.size,
        copy: rate(&copies, 2.0 * copies.size as f64)?,
        copied_bytes: copies.size as u64,
    })
}
