use super::super::{ReadBack, ResponseTokens, SampledTokens, SamplingRows, SamplingRules};
use super::*;
use querl_model::Decoding;
use querl_model::SamplingSettings;
use querl_model::backend::{LogitsProcessor, sample_token};
use std::collections::BTreeSet;

struct Case {
    settings: SamplingSettings,
    stop_ids: BTreeSet<u32>,
    responses: Vec<Vec<u32>>,
    logits: Vec<Vec<f32>>,
}

const MAX_TOKENS: usize = 40;

impl Case {
    fn new(settings: SamplingSettings, n_tokens: usize, seed: u64) -> Self {
        let mut rng = rng(seed);
        let responses: Vec<Vec<u32>> = [0, 1, 2, 3, 9, 30]
            .iter()
            .map(|&n| (0..n).map(|_| rng.random_range(0..n_tokens.min(6) as u32)).collect())
            .collect();
        let row = |_| (0..n_tokens).map(|_| rng.random_range(-60..60) as f32 / 8.0).collect();
        let logits = (0..responses.len()).map(row).collect();
        Self { settings, stop_ids: BTreeSet::from([1, 4]), responses, logits }
    }

    /// Sampled tokens, their log-probabilities, and those under the sampling distribution.
    fn on_device(&self, uniforms: Option<&[f64]>) -> (Vec<u32>, [Vec<f32>; 2]) {
        let padded = |response: &Vec<u32>| [response.clone(), vec![u32::MAX; MAX_TOKENS - response.len()]].concat();
        let responses: Vec<u32> = self.responses.iter().flat_map(padded).collect();
        let lengths: Vec<u32> = self.responses.iter().map(|response| response.len() as u32).collect();
        let stop_ids: Vec<u32> = self.stop_ids.iter().copied().collect();
        let rules = SamplingRules {
            temperature: self.settings.temperature as f32,
            top_p: self.settings.top_p,
            top_k: self.settings.top_k,
            repetition_penalty: self.settings.repetition_penalty as f32,
            no_repeat_ngram_size: self.settings.no_repeat_ngram_size,
            min_new_tokens: self.settings.min_new_tokens,
            stop_ids: gpu().upload(&stop_ids).unwrap(),
        };
        let (n, responses, lengths) =
            (lengths.len(), gpu().upload(&responses).unwrap(), gpu().upload(&lengths).unwrap());
        let mut original_logits = gpu().upload(&vec![f32::NAN; n * MAX_TOKENS]).unwrap();
        let mut logits = gpu().upload(&self.logits.concat()).unwrap();
        let uniforms = uniforms.map(|uniforms| gpu().upload(uniforms).unwrap());
        let mut read_back = ReadBack::new(gpu(), 3 * n).unwrap();
        let seen = rules.read_responses().then(|| ResponseTokens {
            tokens: responses.as_view(),
            max_tokens: MAX_TOKENS,
            original_logits: original_logits.as_view_mut(),
        });
        let uniforms = uniforms.as_ref().map(|uniforms| uniforms.as_view());
        let rows = SamplingRows { lengths: lengths.as_view(), responses: seen, uniforms };
        read_back.write(n, 0..n, |drawn| gpu().choose(&mut logits, rows, &rules, drawn)).unwrap();
        let [tokens, logprobs, behaviour] = read_back.read(gpu(), n).unwrap();
        let floats = |words: &[u32]| words.iter().map(|&word| f32::from_bits(word)).collect();
        (tokens.to_vec(), [floats(logprobs), floats(behaviour)])
    }

    /// Checks that both devices sample the same tokens from the same random numbers.
    fn check(&self, decoding: Decoding, seed: u64) {
        let rules = LogitsProcessor { settings: &self.settings, stop_ids: &self.stop_ids };
        let seeds: Vec<u64> = (0..self.responses.len() as u64).map(|row| seed * 100 + row).collect();
        let uniforms: Vec<f64> = seeds.iter().map(|&seed| rng(seed).random::<f64>()).collect();
        let uniforms = (decoding == Decoding::Sample).then_some(uniforms.as_slice());
        let (tokens, [logprobs, behaviour]) = self.on_device(uniforms);
        for row in 0..self.responses.len() {
            let mut logits = self.logits[row].clone();
            let expected =
                sample_token(&mut logits, &self.responses[row], &rules, decoding, &mut rng(seeds[row])).unwrap();
            assert_eq!(tokens[row], expected.token, "row {row}, {:?}", self.settings);
            let (found, wanted) = ([logprobs[row], behaviour[row]], [expected.logprob, expected.behaviour_logprob]);
            let is_close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6 + 1e-6 * b.abs();
            assert!(found.iter().zip(&wanted).all(is_close), "log-probabilities {found:?}; expected {wanted:?}");
        }
    }
}

fn settings(temperature: f64, top_p: f64, top_k: usize) -> SamplingSettings {
    SamplingSettings { temperature, top_p, top_k, ..SamplingSettings::default() }
}

#[test]
fn the_same_numbers_draw_the_same_tokens_as_on_the_cpu() {
    for (seed, n_tokens) in [7, 512, 513, 3000].into_iter().enumerate() {
        for repeat in 0..4 {
            Case::new(settings(0.8, 1.0, 0), n_tokens, seed as u64).check(Decoding::Sample, repeat);
        }
    }
}

#[test]
fn filters_leave_the_tokens_that_they_leave_on_the_cpu() {
    // Logits are multiples of 1/8, so that many are equal, also at the thresholds of filters.
    for (temperature, top_p, top_k) in
        [(1.0, 0.9, 0), (0.7, 1.0, 5), (1.3, 0.5, 40), (1.0, 0.01, 0), (2.0, 0.999, 300), (1.0, 1.0, 1)]
    {
        for repeat in 0..6 {
            Case::new(settings(temperature, top_p, top_k), 700, repeat).check(Decoding::Sample, repeat);
        }
    }
}

#[test]
fn limits_are_those_of_the_cpu() {
    for (repetition_penalty, no_repeat_ngram_size, min_new_tokens) in
        [(1.3, 0, 0), (0.8, 0, 0), (1.0, 2, 0), (1.0, 1, 0), (1.0, 0, 5), (1.2, 3, 10)]
    {
        let limits =
            SamplingSettings { repetition_penalty, no_repeat_ngram_size, min_new_tokens, ..settings(0.9, 0.95, 50) };
        for repeat in 0..3 {
            let case = Case::new(limits.clone(), 60, repeat);
            case.check(Decoding::Sample, repeat);
            case.check(Decoding::Greedy, repeat);
        }
    }
}

#[test]
fn draws_have_the_frequencies_of_the_distribution() {
    let n = 400;
    let logits: Vec<f32> = (0..9).map(|i| (i as f32 * 1.7).sin()).collect();
    let weights: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp()).collect();
    let total: f64 = weights.iter().sum();
    let case = Case {
        settings: SamplingSettings::default(),
        stop_ids: BTreeSet::new(),
        responses: vec![Vec::new(); n],
        logits: vec![logits; n],
    };
    let uniforms: Vec<f64> = (0..n).map(|i| (i as f64 + 0.5) / n as f64).collect();
    let (tokens, _) = case.on_device(Some(&uniforms));
    for (token, weight) in weights.iter().enumerate() {
        let count = tokens.iter().filter(|&&drawn| drawn as usize == token).count() as f64;
        assert!((count - weight / total * n as f64).abs() <= 1.0, "token {token}: {count}");
    }
}

#[test]
fn rows_that_cannot_be_drawn_from_say_so() {
    let mut case = Case::new(settings(1.0, 0.9, 3), 5, 1);
    case.logits[0][2] = f32::NAN;
    case.logits[1][0] = f32::INFINITY;
    case.logits[2].fill(f32::NEG_INFINITY);
    case.settings.no_repeat_ngram_size = 1;
    case.responses[4] = vec![0, 1, 2, 3, 4];
    let (tokens, _) = case.on_device(Some(&[0.5; 6]));
    assert_eq!(tokens[..3], [SampledTokens::NOT_FINITE; 3]);
    assert!(tokens[3] < 5);
    assert_eq!(tokens[4], SampledTokens::NOTHING_LEFT);
}
