//! `model.enable_thinking` with the template of Qwen3, compared with transformers' `apply_chat_template` (`tests/reference/template.py`).

use crate::{golden, json};
use querl_core::config::ModelConfig;
use querl_core::records::Message;
use querl_model::TextTokenizer;
use serde_json::{Value, from_value};
use std::path::Path;

/// The example's tokenizer with another chat template, as a policy's tokenizer.
fn policy(folder: &Path, template: &str, enable_thinking: Option<bool>) -> Result<TextTokenizer, String> {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tiny-qwen3");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(example.join(file), folder.join(file)).unwrap();
    }
    std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
    let model = serde_json::json!({ "path": folder, "enable_thinking": enable_thinking });
    let model: ModelConfig = from_value(model).unwrap();
    TextTokenizer::for_policy(&model).map_err(|error| error.to_string())
}

/// The golden case of a conversation of Qwen3's template.
fn case<'a>(golden: &'a Value, name: &str, add_generation_prompt: bool) -> (Vec<Message>, &'a str) {
    let cases = golden["cases"].as_array().unwrap();
    let case = cases
        .iter()
        .find(|case| case["name"] == name && case["options"]["add_generation_prompt"] == add_generation_prompt)
        .unwrap();
    (from_value(case["messages"].clone()).unwrap(), case["rendered"].as_str().unwrap())
}

#[test]
fn prompts_and_responses_to_learn_are_the_turns_of_apply_chat_template() {
    let golden = json(&golden("chat_template.json"));
    let folder = tempfile::tempdir().unwrap();
    let template = golden["templates"]["qwen3"].as_str().unwrap();
    let [unset, on, off] =
        [None, Some(true), Some(false)].map(|thinking| policy(folder.path(), template, thinking).unwrap());
    for name in ["user_only", "system_and_user"] {
        let (messages, with_block) = case(&golden, &format!("thinking_off_{name}"), true);
        assert_eq!(off.encode_prompt(&messages).unwrap(), off.encode_rendered(with_block).unwrap(), "{name}");
        assert!(with_block.ends_with("<|im_start|>assistant\n<think>\n\n</think>\n\n"), "{with_block}");
        let (messages, without) = case(&golden, &format!("thinking_on_{name}"), true);
        let expected = on.encode_rendered(without).unwrap();
        assert_eq!(on.encode_prompt(&messages).unwrap(), expected, "{name}");
        assert_eq!(unset.encode_prompt(&messages).unwrap(), expected, "{name}");
    }

    // The block is in the prompt with thinking off, and in the response with thinking on.
    let (turns, rendered) = case(&golden, "thinking_on_answered", false);
    assert_eq!(rendered, case(&golden, "thinking_off_answered", false).1);
    let (answer, prompt) = turns.split_last().unwrap();
    let expected = on.encode_rendered(rendered.strip_suffix('\n').unwrap()).unwrap();
    for tokenizer in [&on, &off] {
        let response = tokenizer.encode_response(&answer.content).unwrap();
        assert_eq!([tokenizer.encode_prompt(prompt).unwrap(), response].concat(), expected);
    }
    let response = on.encode_response(&answer.content).unwrap();
    let text = on.decode(&response[..response.len() - 1]).unwrap();
    assert_eq!(text, format!("<think>\n\n</think>\n\n{}", answer.content));
    assert_eq!(unset.encode_response("a").unwrap(), off.encode_response("a").unwrap());
}

/// As in Qwen3.5: the prompt begins the thinking block, and the training target ends it.
#[test]
fn a_block_that_the_prompt_begins_is_ended_by_the_response_to_learn() {
    let template = "{{ messages[-1].content }}<|im_start|>assistant\n\
                    {% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}";
    let folder = tempfile::tempdir().unwrap();
    let on = policy(folder.path(), template, Some(true)).unwrap();
    let response = on.encode_response("a").unwrap();
    assert_eq!(on.decode(&response[..response.len() - 1]).unwrap(), "\n</think>\n\na");
}

#[test]
fn a_template_without_the_variable_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let message = policy(folder.path(), template, Some(false)).err().unwrap();
    let problem = "the chat template does not read `enable_thinking`; leave out model.enable_thinking, or use";
    assert!(message.starts_with(&format!("{}: {problem}", folder.path().display())), "{message}");
    assert!(policy(folder.path(), template, None).is_ok());
}
