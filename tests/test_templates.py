"""Chat templates are code of strangers: rendered in a process with limits, to what transformers renders."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from running import children, tiny_settings
from tiny import CHAT, save_tiny, tiny_policy, tiny_tokenizer

from lagrpo.errors import SettingsError
from lagrpo.model.chat import Templates
from lagrpo.training.run import train
from lagrpo.types import Prompt

ASK = [{"role": "user", "content": "2 + 3?"}]
TALK = [{"role": "system", "content": "Be brief. <ä>"}, *ASK, {"role": "assistant", "content": "5"}, *ASK]
CHATML = (
    "{%- for m in messages %}\n    {{- '<|' + m.role + '|>' }}\n{{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SOUND = {
    "tiny": CHAT,
    "specials": CHATML,
    "json": "{{ messages | tojson(indent=2) }}",
    "namespace": "{% set n = namespace(c=0) %}{% for m in messages %}{% set n.c = n.c + 1 %}{% endfor %}{{ n.c }}",
    "controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{{ dict(a=1) }}",
}
ENDLESS = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "in C": "{{ 7 ** (7 ** 9) }}",
}
EVIL = {
    "memory": ("{{ 'x' * 2 ** 33 }}", "more than 512 MiB"),
    "more memory": ("{{ 'x' * 10 ** 10 }}", "more than 512 MiB"),
    "by and by": (
        "{% set n = namespace(t='x') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "512 MiB",
    ),
    "long": ("{{ 'x' * 2 ** 23 }}", "8388608 characters, more than 4194304"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError|ended by SIG"),
    "class": ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    "attr": ("{{ (messages | attr('__class__')).mro() }}", "UndefinedError|SecurityError"),
    "globals": ("{{ raise_exception.__globals__['os'] }}", "SecurityError"),
    "globals of a class": ("{{ cycler.__init__.__globals__['os'].getcwd() }}", "SecurityError"),
    "format": ("{{ '{0.__class__.__mro__}'.format(messages) }}", "SecurityError"),
    "a change": ("{% set _ = messages.clear() %}{{ messages | length }}", "SecurityError"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{{ self.__init__.__globals__ }}", "SecurityError|UndefinedError"),
    "filter": ("{{ messages | map(attribute='content.upper') | sum }}", "TypeError"),
    "arithmetic": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "syntax": ("{% for m in messages %}", "Unexpected end of template"),
    "refusal": ("{{ raise_exception('no\nsystem') }}", "no system"),
    "escape": ("{{ raise_exception('red \x1b[31m') }}", "red ␛"),
    "surrogate": ("{{ '\\ud800' }}", "character 0 is '.ud800', half of a surrogate pair"),
    "empty": ("", "no token: it is the text ''"),
    "blank": ("{# nothing #}", "no token: it is the text ''"),
}


@pytest.fixture(scope="module")
def templates():
    shared = Templates(deadline=60.0)  # also on a busy machine a template gets as far as the limit of memory
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("messages", [ASK, TALK], ids=["one turn", "four turns"])
@pytest.mark.parametrize("template", SOUND.values(), ids=list(SOUND))
def test_what_is_rendered_is_what_transformers_renders(template, messages):
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = template
    expected = policy.chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert list(policy.chat.tokenize(Prompt(0, tuple(messages), "5")).token_ids) == expected["input_ids"]
    policy.chat.templates.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not keep limits on address space")
@pytest.mark.parametrize(("template", "reason"), EVIL.values(), ids=list(EVIL))
def test_a_template_that_does_harm_is_one_line_and_the_next_one_is_rendered(templates, template, reason):
    check_refusal(templates, template, reason)


@pytest.mark.parametrize("template", ENDLESS.values(), ids=list(ENDLESS))
def test_a_template_without_end_is_one_line_and_the_next_one_is_rendered(template):
    hurried = Templates(deadline=2.0)
    check_refusal(hurried, template, "no text within 2 s")
    hurried.close()


def check_refusal(templates: Templates, template: str, reason: str) -> None:
    chat = replace(tiny_policy().chat, templates=templates)
    chat.tokenizer.chat_template = template
    with pytest.raises(ValueError, match=reason) as refused:
        chat.tokenize(Prompt(0, tuple(ASK), "5"))
    assert len(str(refused.value).splitlines()) == 1
    chat.tokenizer.chat_template = CHAT
    assert chat.decode(chat.tokenize(Prompt(0, tuple(ASK), "5")).token_ids).startswith("user: 2 + 3?")


def test_a_chat_template_gets_the_arguments_of_the_chat(templates):
    """And the tokenizer's special tokens beside them."""
    chat = replace(tiny_policy().chat, templates=templates, arguments={"enable_thinking": False})
    chat.tokenizer.chat_template = "{{ eos_token }}{% if enable_thinking is false %}no thinking{% endif %}"
    rendered = chat.tokenizer.apply_chat_template(ASK, enable_thinking=False, tokenize=False)
    assert rendered == "<eos>no thinking"
    assert list(chat.tokenize(Prompt(0, tuple(ASK), "5")).token_ids) == chat.encode(rendered)


def test_a_template_that_loops_on_one_prompt_only_is_refused_before_the_run_is_made(
    model, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("lagrpo.model.chat.DEADLINE", 1.0)
    looping = (
        "{% if messages[0].content == 'xxx?' %}{% set n = messages | length + 8 %}{{ 7 ** (7 ** n) }}{% endif %}" + CHAT
    )
    (tmp_path / "chat.jinja").write_text(looping)
    settings = tiny_settings(model, tmp_path / "runs", model={"chat_template": str(tmp_path / "chat.jinja")})
    with pytest.raises(SettingsError, match=r"prompt 3 of .*: the chat template cannot render it: no text within 1 s"):
        train(settings)
    assert not (tmp_path / "runs").exists()
    assert capfd.readouterr() == ("", "")
    assert not children()


def test_no_process_is_left_by_a_model_that_is_refused(model, tmp_path):
    with pytest.raises(SettingsError, match="longest position"):
        train(tiny_settings(model, tmp_path / "runs", sampling={"max_tokens": 1000}))
    assert not children()


def test_a_run_leaves_no_process(model, tmp_path):
    train(tiny_settings(model, tmp_path / "runs", schedule={"batches": 1}))
    assert not children()


def test_a_template_that_is_forgotten_takes_its_process_along():
    templates = Templates()
    assert templates.render(CHAT, tiny_tokenizer().special_tokens_map, ASK).startswith("user: 2")
    assert len(children()) == 1
    del templates
    assert not children()


def test_a_token_outside_the_models_vocabulary_is_refused():
    policy = tiny_policy()
    policy.chat.tokenizer.add_tokens(["?!"])
    with pytest.raises(ValueError, match="token 103 is outside the model's vocabulary of 103"):
        policy.chat.tokenize(Prompt(0, ({"role": "user", "content": "What?!"},), "5"))
    policy.chat.templates.close()
