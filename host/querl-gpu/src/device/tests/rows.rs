use super::super::{Masks, Namers};
use super::{assert_close, floats, gpu, halves, random, rng, rounded};
use querl_model::backend::DropoutMask;
use querl_model::backend::normal;
use querl_model::{Dropout, Shard};

#[test]
fn dropout_drops_what_it_drops_on_the_cpu() {
    for (n_rows, width) in [(1, 1), (37, 33), (64, 512)] {
        let (x, row_keys) = (rounded(&mut rng(1), n_rows * width), (0..n_rows as u64).map(|row| row * 77).collect());
        let mask = DropoutMask::new(Dropout { p: 0.3, seed: 5 }, row_keys, Shard::FULL).unwrap();
        let mut expected = x.clone();
        mask.of_layer("a.layer", width).apply(&mut expected);
        let row_keys = gpu().upload(mask.row_keys()).unwrap();
        let masks = Masks { row_keys: &row_keys, layer_seed: mask.seed_of("a.layer"), first_input: 0, p: mask.p() };
        let found = floats(&gpu().dropped(&halves(&x), width, masks).unwrap());
        assert_close("dropped", &found, &expected, 4e-3, 0.0);
        assert!(found.iter().zip(&expected).all(|(a, b)| (*a == 0.0) == (*b == 0.0)));

        let base = random(&mut rng(2), x.len());
        let mut sum = gpu().upload(&base).unwrap();
        gpu().add_dropped(&mut sum, &halves(&x), width, masks).unwrap();
        let expected: Vec<f32> = base.iter().zip(&expected).map(|(base, dropped)| base + dropped).collect();
        assert_close("added", &gpu().download(&sum).unwrap(), &expected, 1e-6, 1e-6);
    }
}

#[test]
fn dropout_of_a_part_of_the_inputs_drops_what_it_drops_of_all_of_them() {
    let (n_rows, width, first) = (37, 96, 32);
    let (x, row_keys) = (rounded(&mut rng(1), n_rows * width), gpu().upload(&vec![5u64; n_rows]).unwrap());
    let dropped = |x: &[f32], width, first_input| {
        let masks = Masks { row_keys: &row_keys, layer_seed: 9, first_input, p: 0.3 };
        floats(&gpu().dropped(&halves(x), width, masks).unwrap())
    };
    let columns = |all: &[f32]| all.chunks(width).flat_map(|row| &row[first..]).copied().collect::<Vec<f32>>();
    assert_eq!(dropped(&columns(&x), width - first, first), columns(&dropped(&x, width, 0)));
}

#[test]
fn gradients_of_a_row_that_is_named_often_are_added_in_their_order() {
    let (width, places) = (45, [3, 0, 3, 3, 1, 0]);
    let grad = random(&mut rng(3), places.len() * width);
    let mut expected = vec![0f32; 5 * width];
    for (place, grad) in places.iter().zip(grad.chunks(width)) {
        let row = &mut expected[*place as usize * width..][..width];
        row.iter_mut().zip(grad).for_each(|(sum, grad)| *sum += grad);
    }
    let namers = Namers::new(gpu(), &places, 5).unwrap();
    let found = gpu().sum_rows(&gpu().upload(&grad).unwrap(), &namers, width).unwrap();
    assert_eq!(gpu().download(&found).unwrap(), expected);
    assert!(Namers::new(gpu(), &[5], 5).is_err());
}

#[test]
fn normal_numbers_are_those_of_the_cpu() {
    for n in [1, 2, 4097] {
        let found = floats(&gpu().normal(n, 99, 0.02).unwrap());
        // The last bits of logarithm, cosine and sine are a device's own; bf16 keeps 8.
        assert_close("normal", &found, &normal(n, 99, 0.02), 4e-3, 1e-6);
    }
}

#[test]
fn normal_numbers_of_a_part_are_those_of_the_whole_matrix() {
    let (n_rows, width) = (21, 15);
    let whole = floats(&gpu().normal(n_rows * width, 99, 0.02).unwrap());
    for (rows, columns) in [(0..21, 0..15), (7..14, 0..15), (0..21, 5..10), (3..4, 14..15)] {
        let expected: Vec<f32> = rows.clone().flat_map(|row| &whole[row * width..][columns.clone()]).copied().collect();
        assert_eq!(floats(&gpu().normal_part(rows, columns, width, 99, 0.02).unwrap()), expected);
    }
}

#[test]
fn few_values_and_many_come_to_the_card_as_they_are() {
    for n in [1, 1000, 300_000] {
        let values: Vec<u32> = (0..n).map(|i| i * 2_654_435).collect();
        // More at once than there are pieces of page-locked memory.
        let uploaded: Vec<_> = (0..20).map(|_| gpu().upload(&values).unwrap()).collect();
        assert!(uploaded.iter().all(|uploaded| gpu().download(uploaded).unwrap() == values));
    }
    let bytes: Vec<u8> =
        (0..40_000_003u32).flat_map(|i| half::bf16::from_f32((i % 251) as f32).to_le_bytes()).collect();
    let found = gpu().upload_floats(&bytes, candle_core::DType::BF16).unwrap();
    let found = gpu().download(&found).unwrap();
    assert!(found.iter().enumerate().all(|(i, x)| x.to_f32() == (i % 251) as f32));
}
