//! Chat templates against transformers' `apply_chat_template`; expected texts from `tests/reference/template.py`.
#![allow(clippy::unwrap_used)]

use querl_model::ChatTemplate;
use std::path::Path;

#[test]
fn templates_render_as_transformers_renders_them() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/golden/chat_template.json");
    let golden: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() >= 20);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let source = golden["templates"][case["template"].as_str().unwrap()].as_str().unwrap();
        let mut options = case["options"].as_object().cloned().unwrap_or_default();
        let generation_prompt = options.remove("add_generation_prompt").and_then(|v| v.as_bool()).unwrap_or(false);
        let template = ChatTemplate::new(source, Vec::new()).unwrap();
        let rendered = template.render_with(&case["messages"], generation_prompt, &options.into());
        match case["error"].as_str() {
            Some(message) => assert!(rendered.unwrap_err().to_string().contains(message), "{name}"),
            None => assert_eq!(rendered.unwrap(), case["rendered"].as_str().unwrap(), "{name}"),
        }
    }
}
