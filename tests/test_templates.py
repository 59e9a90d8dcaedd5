"""Chat templates: what transformers renders, and what becomes of a template that fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
from running import tiny_settings
from tiny import CHAT, save_tiny, tiny_policy

from lagrpo.errors import SettingsError
from lagrpo.model.chat import TemplateError
from lagrpo.training.run import train
from lagrpo.types import Prompt

ASK = [{"role": "user", "content": "2 + 3?"}]
TALK = [{"role": "system", "content": "Be brief. <ä>"}, *ASK, {"role": "assistant", "content": "5"}, *ASK]
SPECIALS = "{% for m in messages %}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("messages", [ASK, TALK], ids=["one turn", "four turns"])
@pytest.mark.parametrize("template", [CHAT, SPECIALS, "{{ messages | tojson(indent=2) }}"])
def test_tokenize_gives_what_apply_chat_template_gives(template, messages):
    chat = tiny_policy().chat
    chat.tokenizer.chat_template = template
    expected = chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert list(chat.tokenize(Prompt(0, tuple(messages), "5")).token_ids) == expected["input_ids"]


def test_template_gets_the_kwargs_of_the_chat_and_the_special_tokens():
    chat = replace(tiny_policy().chat, template_kwargs={"enable_thinking": False})
    chat.tokenizer.chat_template = "{{ eos_token }}{% if enable_thinking is false %}no thinking{% endif %}"
    assert chat.render(ASK) == "<eos>no thinking"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ raise_exception('no\nsystem \x1b[31m') }}", "no system ␛"),
    ],
)
def test_template_that_fails_raises_one_line(template, reason):
    chat = tiny_policy().chat
    chat.tokenizer.chat_template = template
    with pytest.raises(TemplateError, match=reason) as raised:
        chat.render(ASK)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("", "no token: it is the text ''"),
        ("{{ '\\ud800' }}", "half of a surrogate pair"),
    ],
)
def test_prompt_without_tokens_is_rejected(template, reason):
    chat = tiny_policy().chat
    chat.tokenizer.chat_template = template
    with pytest.raises(ValueError, match=reason):
        chat.tokenize(Prompt(0, tuple(ASK), "5"))


def test_token_outside_the_vocabulary_is_rejected():
    chat = tiny_policy().chat
    chat.tokenizer.add_tokens(["?!"])
    with pytest.raises(ValueError, match="token 103 is outside the model's vocabulary of 103"):
        chat.tokenize(Prompt(0, ({"role": "user", "content": "What?!"},), "5"))


def test_template_that_fails_on_one_prompt_ends_the_run_before_it_is_made(tmp_path):
    failing = "{% if messages[0].content == 'xxx?' %}{{ raise_exception('no x') }}{% endif %}" + CHAT
    (tmp_path / "chat.jinja").write_text(failing)
    model = save_tiny(tmp_path / "model")
    settings = tiny_settings(model, tmp_path / "runs", model={"chat_template": str(tmp_path / "chat.jinja")})
    with pytest.raises(SettingsError, match=r"prompt 3 of .*: the chat template cannot render it: no x"):
        train(settings)
    assert not (tmp_path / "runs").exists()
