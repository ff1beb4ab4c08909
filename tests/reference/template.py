"""Chat templates rendered by transformers' apply_chat_template, in golden/chat_template.json.

Two templates are written here: `chatml` is the bare format; `qwen3_style` also drops the reasoning of earlier turns,
with the Python string methods, slices and namespaces that released Qwen3 templates use. `qwen3` is that of the models
Qwen3-0.6B to Qwen3-32B (qwen3.jinja, Apache License 2.0), with its variable `enable_thinking`.
transformers renders with trim_blocks and lstrip_blocks on; a renderer without them adds blank lines.
"""

from pathlib import Path

from common import GOLDEN, write_json
import jinja2
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unexpected role: ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Block tags without minus signs on purpose, for trim_blocks and lstrip_blocks.
QWEN3_STYLE = """\
{% if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{% for message in messages[::-1] %}
    {% set index = (messages | length - 1) - loop.index0 %}
    {% if ns.last_user < 0 and message.role == 'user' %}
        {% set ns.last_user = index %}
    {% endif %}
{% endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set answer = content %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set answer = content.split('</think>')[-1].lstrip('\\n') %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_user and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + answer }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + answer }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

QWEN3 = (Path(__file__).parent / "qwen3.jinja").read_text(encoding="utf-8")
TEMPLATES = {"chatml": CHATML, "qwen3_style": QWEN3_STYLE, "qwen3": QWEN3}


def turn(role, content):
    return {"role": role, "content": content}


SYSTEM = turn("system", "Rewrite the query. Answer with one line.")
CONVERSATIONS = {
    "user_only": [turn("user", "What is a tensor?")],
    "system_and_user": [SYSTEM, turn("user", "怎么重置密码？\n\n谢谢")],
    "several_turns": [SYSTEM, turn("user", "hello"), turn("assistant", "hi"), turn("user", " spaces kept  \n")],
    "answered": [SYSTEM, turn("user", "2 < 3 & \"quotes\" <b>"), turn("assistant", "yes, 'indeed' 🦀")],
    "reasoned": [
        turn("user", "first"),
        turn("assistant", "<think>\nan earlier thought\n</think>\n\nfirst answer"),
        turn("user", "second"),
        turn("assistant", "<think>\nlast thought\n</think>\n\nsecond answer"),
    ],
    "system_untrimmed": [turn("system", "  padded system \n"), turn("user", "go")],
}
OPTIONS = [{"add_generation_prompt": True}, {"add_generation_prompt": False}]


def case(tokenizer, template, name, messages, options):
    record = {"template": template, "name": name, "messages": messages, "options": options}
    try:
        rendered = tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATES[template], tokenize=False, **options
        )
        return record | {"rendered": rendered}
    except jinja2.exceptions.TemplateError as error:
        return record | {"error": str(error)}


def main():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")))
    cases = [
        case(tokenizer, template, name, messages, options)
        for template in TEMPLATES
        for name, messages in CONVERSATIONS.items()
        for options in OPTIONS
    ]
    without_thinking = {"add_generation_prompt": True, "enable_thinking": False}
    cases.append(case(tokenizer, "qwen3_style", "no_thinking", CONVERSATIONS["user_only"], without_thinking))
    cases += [
        case(tokenizer, "qwen3", f"thinking_{state}_{name}", CONVERSATIONS[name], options | {"enable_thinking": state == "on"})
        for state in ("on", "off")
        for name in ("user_only", "system_and_user", "answered", "reasoned")
        for options in OPTIONS
    ]
    cases.append(case(tokenizer, "chatml", "unknown_role", [turn("critic", "no")], OPTIONS[0]))
    write_json(
        GOLDEN / "chat_template.json",
        {
            "versions": {"transformers": transformers.__version__, "jinja2": jinja2.__version__},
            "templates": TEMPLATES,
            "cases": cases,
        },
    )
    print(f"chat_template.json: {len(cases)} cases")


if __name__ == "__main__":
    main()
