//! Style scorers that call the style model of the run many times.

use crate::common::{assert_others_are_served, host, host_with, load_guest, with_plenty_of_fuel};
use querl_core::ports::{FaultKind, PluginFault, StyleModel, StyleScorer};
use querl_core::records::{CallFailure, Dialogue, Message, StyleProbability};
use querl_plugin::{PluginHost, PluginPort, PluginSettings};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A model with one class that takes this long for a dialogue.
struct Slow(Duration);

impl StyleModel for Slow {
    fn classify(&self, _: &[Message]) -> Result<Vec<StyleProbability>, CallFailure> {
        std::thread::sleep(self.0);
        Ok(vec![StyleProbability { label: "售前".into(), probability: 1.0 }])
    }
}

/// A scorer that calls the model once per dialogue, and endlessly for a dialogue whose id starts with `x`.
fn scorer(host: &PluginHost, model_time: Duration) -> Box<dyn StyleScorer> {
    let plugin = load_guest(host, "classifies").unwrap();
    host.open(&plugin, &PluginSettings::default(), PluginPort::style_scorer(Some(Arc::new(Slow(model_time))))).unwrap()
}

fn dialogue(id: &str) -> Dialogue {
    Dialogue {
        id: id.into(),
        turns: vec![Message { role: "assistant".into(), content: "您好，请问订单号是多少？".into() }],
    }
}

fn fault_then_served(host: &PluginHost, scorer: &dyn StyleScorer) -> (PluginFault, Duration) {
    let start = Instant::now();
    let fault = scorer.score_batch(&[dialogue("x")]).unwrap_err();
    let elapsed = start.elapsed();
    assert_eq!(fault.kind, FaultKind::Limit);
    assert_eq!(scorer.score_batch(&[dialogue("a")]).unwrap()[0].as_ref().unwrap().total, 0.5);
    assert_others_are_served(host);
    (fault, elapsed)
}

#[test]
fn endless_questions_to_a_quick_model_are_stopped_by_fuel() {
    let host = host();
    let (fault, _) = fault_then_served(&host, &*scorer(&host, Duration::ZERO));
    assert!(fault.to_string().starts_with("plugin classifies 0.1.0: dialogue `x`: used up its fuel"), "{fault}");
}

#[test]
fn endless_questions_to_a_slow_model_are_stopped_by_the_clock() {
    let host = host_with(with_plenty_of_fuel(200));
    let scorer = scorer(&host, Duration::from_millis(20));
    let least = (0..3)
        .map(|_| {
            let (fault, elapsed) = fault_then_served(&host, &*scorer);
            assert!(fault.to_string().contains("dialogue `x`: ran for longer than 200 ms"), "{fault}");
            elapsed
        })
        .min()
        .unwrap();
    assert!(least >= Duration::from_millis(200) && least < Duration::from_millis(250), "{least:?}");
}

#[test]
fn model_that_takes_longer_than_a_call_may_is_waited_for_once() {
    let host = host_with(with_plenty_of_fuel(100));
    let scorer = scorer(&host, Duration::from_millis(300));
    let start = Instant::now();
    let fault = scorer.score_batch(&[dialogue("a")]).unwrap_err();
    assert!(fault.to_string().contains("dialogue `a`: ran for longer than 100 ms"), "{fault}");
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert_others_are_served(&host);
}
