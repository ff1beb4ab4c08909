//! Ranks with a card each: sums over two cards, which are NCCL's. On a machine with one card they are not run.

use super::*;
use candle_core::{Device, Result, Tensor};
use querl_model::{Ranks, RanksError, run_ranks};

/// Whether there is a second card to sum with.
fn has_two_cards() -> bool {
    Gpu::new(1).is_ok()
}

fn on_two_cards<T: Send>(work: impl Fn(Ranks, Gpu) -> Result<T> + Sync) -> Vec<T> {
    run_ranks(2, |ranks| {
        let gpu = Gpu::new(ranks.rank())?;
        work(ranks, gpu)
    })
    .unwrap()
}

#[test]
fn two_cards_sum_what_they_hold() {
    if !has_two_cards() {
        return;
    }
    let of_rank = |rank: usize| random(&mut rng(7 + rank as u64), 100_003);
    let expected: Vec<f32> = of_rank(0).iter().zip(of_rank(1)).map(|(a, b)| a + b).collect();
    let sums = on_two_cards(|ranks, gpu| {
        let mut values = gpu.upload(&of_rank(ranks.rank()))?;
        gpu.all_reduce(&ranks, &mut values)?;
        gpu.download(&values)
    });
    assert!(sums[0] == sums[1], "ranks with other sums");
    assert_eq!(sums[0], expected);
}

/// As long a sum as NCCL's direct writes into another card's memory are for.
#[test]
fn two_cards_sum_64_mib() {
    if !has_two_cards() {
        return;
    }
    let n_values = 16 << 20;
    let sums = on_two_cards(|ranks, gpu| {
        let mut values = gpu.upload(&vec![(ranks.rank() + 1) as f32; n_values])?;
        gpu.all_reduce(&ranks, &mut values)?;
        gpu.download(&values)
    });
    assert!(sums.iter().flatten().all(|sum| *sum == 3.0) && sums[1].len() == n_values);
}

#[test]
fn tensors_of_cards_are_summed_where_they_are_and_stay_as_they_were() {
    if !has_two_cards() {
        return;
    }
    let sums = on_two_cards(|ranks, gpu| {
        let tensor = (Tensor::ones((3, 5), candle_core::DType::F32, &gpu.device())? * (ranks.rank() + 1) as f64)?;
        // A part of a tensor, in another order than its storage.
        let part = tensor.narrow(1, 1, 2)?.t()?;
        let sum = ranks.sum_tensor(&part)?;
        ranks.settle(&sum)?;
        assert!(!sum.device().is_cpu() && sum.dims() == [2, 3]);
        let kept = tensor.to_device(&Device::Cpu)?.to_vec2::<f32>()?;
        assert_eq!(kept, vec![vec![(ranks.rank() + 1) as f32; 5]; 3]);
        sum.to_device(&Device::Cpu)?.to_vec2::<f32>()
    });
    assert_eq!(sums, vec![vec![vec![3.0; 3]; 2]; 2]);
}

#[test]
fn two_ranks_on_one_card_are_refused_by_nccl() {
    if !has_two_cards() {
        return;
    }
    let failures = run_ranks(2, |ranks| {
        let mut values = gpu().upload(&[1f32; 8])?;
        gpu().all_reduce(&ranks, &mut values)
    });
    let failures: Vec<String> = failures.unwrap_err().iter().map(ToString::to_string).collect();
    assert!(failures[0].contains("ncclCommInitRankConfig of NCCL "), "{failures:?}");
}

#[test]
fn groups_of_one_card_sum_without_nccl() {
    let mut values = gpu().upload(&[1f32, 2.0]).unwrap();
    gpu().all_reduce(&Ranks::alone(), &mut values).unwrap();
    assert_eq!(gpu().download(&values).unwrap(), [1.0, 2.0]);
    let alone = run_ranks(2, |ranks| Ok::<_, RanksError>(ranks.split(ranks.rank())?.world_size())).unwrap();
    assert_eq!(alone, [1, 1]);
}
