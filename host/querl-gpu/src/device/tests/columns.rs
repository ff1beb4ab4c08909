use super::*;

const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 64), (33, 65), (70, 136), (5, 7), (0, 8)];

#[test]
fn columns_get_their_factors_and_what_is_added() {
    let mut rng = rng(1);
    for (n_rows, width) in SHAPES {
        let (x, factors, bias) = (rounded(&mut rng, n_rows * width), random(&mut rng, width), random(&mut rng, width));
        let expected: Vec<f32> = (0..x.len()).map(|i| x[i] * factors[i % width]).collect();
        let with_bias: Vec<f32> = (0..x.len()).map(|i| expected[i] + bias[i % width]).collect();
        let (on_card, in_bf16) = (gpu().upload(&x).unwrap(), halves(&x));
        let [factors, bias] = [factors, bias].map(|values| gpu().upload(&values).unwrap());
        assert_rounded("f32", &gpu().scaled_columns(&on_card, &factors, Some(&bias)).unwrap(), &with_bias);
        assert_rounded("bf16", &gpu().scaled_values(&in_bf16, &factors).unwrap(), &expected);
        let mut sum = gpu().upload(&vec![2f32; x.len()]).unwrap();
        gpu().add_scaled_columns(&on_card, &factors, None, &mut sum).unwrap();
        let added: Vec<f32> = expected.iter().map(|x| x + 2.0).collect();
        assert_close("added", &gpu().download(&sum).unwrap(), &added, 1e-6, 1e-6);
    }
    let (x, factors) = (gpu().upload(&[1f32; 6]).unwrap(), gpu().upload(&[1f32; 4]).unwrap());
    assert!(gpu().scaled_columns(&x, &factors, None).is_err());
}

#[test]
fn columns_are_added_in_one_order() {
    let mut rng = rng(2);
    for (n_rows, width) in SHAPES {
        let (a, b) = (rounded(&mut rng, n_rows * width), rounded(&mut rng, n_rows * width));
        let sums = |value: &dyn Fn(usize) -> f64| -> Vec<f32> {
            (0..width).map(|c| (0..n_rows).map(|row| value(row * width + c)).sum::<f64>() as f32).collect()
        };
        let (products, alone) = (sums(&|i| f64::from(a[i]) * f64::from(b[i])), sums(&|i| f64::from(a[i])));
        let (a, b) = (halves(&a), halves(&b));
        let of_products = || gpu().download(&gpu().column_totals(&a, Some(&b), width).unwrap()).unwrap();
        assert_close("products", &of_products(), &products, 1e-5, 1e-5);
        assert_repeatable("products", of_products);
        let found = gpu().download(&gpu().column_totals(&a, None, width).unwrap()).unwrap();
        assert_close("alone", &found, &alone, 1e-5, 1e-5);
    }
}
