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

ASK = ({"role": "user", "content": "2 + 3?"},)
TALK = ({"role": "system", "content": "Be brief. <ä>"}, *ASK, {"role": "assistant", "content": "5"}, *ASK)


@pytest.fixture
def chat():
    return tiny_policy().chat


def test_tokenize_gives_what_apply_chat_template_gives(chat):
    specials = "{% for m in messages %}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    for template in (CHAT, specials, "{{ messages | tojson(indent=2) }}"):
        chat.tokenizer.chat_template = template
        for messages in (ASK, TALK):
            expected = chat.tokenizer.apply_chat_template([*messages], add_generation_prompt=True, return_dict=True)
            assert list(chat.tokenize(Prompt(0, messages, "5")).token_ids) == expected["input_ids"]


def test_template_gets_the_kwargs_of_the_chat_and_the_special_tokens(chat):
    chat.tokenizer.chat_template = "{{ eos_token }}{% if enable_thinking is false %}no thinking{% endif %}"
    assert replace(chat, template_kwargs={"enable_thinking": False}).render(ASK) == "<eos>no thinking"


def test_template_that_fails_raises_one_line(chat):
    for template, reason in {
        "{{ ''.__class__.__mro__ }}": "SecurityError",
        "{% for m in messages %}": "Unexpected end of template",
        "{{ raise_exception('no\nsystem \x1b[31m') }}": "no system ␛",
    }.items():
        chat.tokenizer.chat_template = template
        with pytest.raises(TemplateError, match=reason) as raised:
            chat.render(ASK)
        assert len(str(raised.value).splitlines()) == 1


def test_prompt_without_tokens_or_with_unknown_ones_is_rejected(chat):
    chat.tokenizer.add_tokens(["?!"])
    for template, reason in {
        "": "no token: it is the text ''",
        "{{ '\\ud800' }}": "surrogates not allowed",
        "What?!": "token 103 is outside the model's vocabulary of 103",
    }.items():
        chat.tokenizer.chat_template = template
        with pytest.raises(ValueError, match=reason):
            chat.tokenize(Prompt(0, ASK, "5"))


def test_template_that_fails_on_one_prompt_ends_the_run_before_it_is_made(tmp_path):
    failing = "{% if messages[0].content == 'xxx?' %}{{ raise_exception('no x') }}{% endif %}" + CHAT
    (tmp_path / "chat.jinja").write_text(failing)
    model = save_tiny(tmp_path / "model")
    settings = tiny_settings(model, tmp_path / "runs", model={"chat_template": str(tmp_path / "chat.jinja")})
    with pytest.raises(SettingsError, match=r"prompt 3 of .*: the chat template cannot render it: no x"):
        train(settings)
    assert not (tmp_path / "runs").exists()
