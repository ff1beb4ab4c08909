use super::*;
use querl_sdk::Message;
use querl_sdk::testing::{no_style_model, style_model};

const CLASSES: [(&str, f64); 5] = [("售前", 0.1), ("售后", 0.05), ("诚实", 0.2), ("有帮助", 0.6), ("无伤害", 0.05)];

fn dialogue(answer: &str) -> Dialogue {
    let turn = |role, content: &str| Message { role, content: content.into() };
    Dialogue { id: "d".into(), turns: vec![turn(Role::User, "怎么洗？"), turn(Role::Assistant, answer)] }
}

fn scored(settings: &[(&str, &str)], answer: &str) -> Score {
    let style = Style::new(&Settings::from_pairs(settings.iter().copied())).unwrap();
    style.score(&dialogue(answer), &style_model(CLASSES)).unwrap()
}

fn total(settings: &[(&str, &str)], answer: &str) -> f64 {
    scored(settings, answer).total
}

fn assert_near(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-12, "{found} is not {expected}");
}

#[test]
fn golden_cases_hold() {
    querl_sdk::testing::golden("golden").style_scorer::<Style>();
}

#[test]
fn the_wanted_classes_are_summed_by_weight() {
    assert_near(total(&[], "冷水洗。"), 0.6);
    assert_near(total(&[("targets", r#"["有帮助", "诚实=0.5"]"#)], "冷水洗。"), 0.7);
    let score = scored(&[], "冷水洗。");
    let names: Vec<_> = score.components.iter().map(|part| part.name.as_str()).collect();
    let expected = ["target", "rival", "penalty", "length", "class_0", "class_1", "class_2", "class_3", "class_4"];
    assert_eq!(names, expected);
}

#[test]
fn beyond_the_margin_nothing_is_earned() {
    assert_near(total(&[("margin", "1")], "冷水洗。"), 0.7);
    assert_near(total(&[("margin", "0.4")], "冷水洗。"), 1.0);
    assert_near(total(&[("margin", "0.2")], "冷水洗。"), 1.0);
    assert_near(total(&[("margin", "0.2"), ("targets", r#"["无伤害"]"#)], "冷水洗。"), 0.0);
}

#[test]
fn penalties_are_taken_off_and_no_total_is_below_0() {
    assert_near(total(&[("penalties", r#"["售前=2"]"#)], "冷水洗。"), 0.4);
    assert_near(total(&[("penalties", r#"["诚实=10"]"#)], "冷水洗。"), 0.0);
}

/// Regression: a class with a penalty was no rival, so that it scored higher than a class without a penalty.
#[test]
fn a_penalty_never_raises_a_total() {
    let of = |penalties: &str, margin: &str, model: [(&str, f64); 3]| {
        let pairs = [("targets", r#"["诚实"]"#), ("penalties", penalties), ("margin", margin)];
        let style = Style::new(&Settings::from_pairs(pairs)).unwrap();
        style.score(&dialogue("这个我不确定。"), &style_model(model)).unwrap().total
    };
    for (honest, sales) in (0..=8).flat_map(|honest| (0..=8 - honest).map(move |sales| (honest, sales))) {
        let share = |eighths: i32| f64::from(eighths) / 8.0;
        let model = [("诚实", share(honest)), ("售前", share(sales)), ("有帮助", share(8 - honest - sales))];
        for margin in ["0", "0.25", "0.5", "1"] {
            let without = of("[]", margin, model);
            for penalty in [r#"["售前=0.5"]"#, r#"["售前=2"]"#, r#"["售前=0.1", "有帮助"]"#] {
                let with = of(penalty, margin, model);
                assert!(with <= without, "{model:?}, margin {margin}, {penalty}: {with} is more than {without}");
            }
        }
    }
    // The same distribution with the probabilities of two classes swapped: the class with a penalty must not score higher.
    let pitch = of(r#"["售前=0.5"]"#, "0.5", [("诚实", 0.34), ("售前", 0.6), ("有帮助", 0.06)]);
    let help = of(r#"["售前=0.5"]"#, "0.5", [("诚实", 0.34), ("售前", 0.06), ("有帮助", 0.6)]);
    assert!(pitch < help, "{pitch} for a pitch, {help} for help");
}

#[test]
fn an_answer_of_the_wrong_length_counts_less() {
    assert_near(total(&[("min_chars", "8")], "冷水洗。"), 0.3);
    assert_near(total(&[("max_chars", "4")], "冷水洗。"), 0.6);
    assert_near(total(&[("max_chars", "4")], "冷水洗就行。"), 0.3);
    assert_near(total(&[("max_chars", "4")], "冷水洗就行，不要暴晒。"), 0.0);
    assert_near(total(&[], " \n"), 0.0);
}

#[test]
fn what_cannot_be_scored_is_rejected() {
    let style = Style::new(&Settings::none()).unwrap();
    let code = |dialogue: &Dialogue, model: &dyn StyleModel| style.score(dialogue, model).unwrap_err().code;
    assert_eq!(code(&dialogue("好"), &no_style_model()), "style_model_missing");
    assert_eq!(code(&dialogue("好"), &style_model([("别的", 1.0)])), "unknown_class");
    let asked = Dialogue { turns: dialogue("好").turns[..1].to_vec(), ..dialogue("好") };
    assert_eq!(code(&asked, &style_model(CLASSES)), "no_answer");
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    let key = |pairs: &[(&str, &str)]| Style::new(&Settings::from_pairs(pairs.iter().copied())).unwrap_err().key;
    assert_eq!(key(&[("targets", r#"["诚实=2"]"#)]), "targets");
    assert_eq!(key(&[("targets", r#"["诚实", "诚实=0.5"]"#)]), "targets");
    assert_eq!(key(&[("penalties", r#"["有帮助"]"#)]), "penalties");
    assert_eq!(key(&[("min_chars", "9"), ("max_chars", "8")]), "max_chars");
}
