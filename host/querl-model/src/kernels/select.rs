//! Rows of a tensor by index, some of them more than once.

use candle_core::{Result, Tensor};

/// `(places, width)`: the rows of `x` `(N, width)` that `places` names, in its order. Gradients reach `x`; those of a row that is
/// named more than once are added in the order of `places`.
///
/// # Errors
/// A place that is not below N.
pub fn select_rows(x: &Tensor, places: Vec<u32>) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if !x.device().is_cpu() {
        return super::card::select_rows(x, places);
    }
    let n_places = places.len();
    x.index_select(&Tensor::from_vec(places, n_places, x.device())?, 0)
}
