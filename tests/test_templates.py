"""Chat templates: what transformers renders, what lagrpo reads from them, and what becomes of a template that fails."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from running import tiny_settings
from test_episodes import TURNS
from test_resume import cut_to, go_on
from tiny import CHAT, save_tiny, tiny_model, tiny_policy, tiny_tokenizer

from lagrpo.errors import SettingsError
from lagrpo.model.chat import Chat, pin_date
from lagrpo.runs import load_rollouts
from lagrpo.training.run import train
from lagrpo.types import Prompt
from lagrpo.verify import verify_run

ASK = ({"role": "user", "content": "2 + 3?"},)
TALK = (
    {"role": "system", "content": "Be brief. <ä>"},
    *ASK,
    {"role": "assistant", "content": "5"},
    *ASK,
)


@pytest.fixture
def chat():
    return tiny_policy().chat


def test_tokenize_gives_what_apply_chat_template_gives(chat):
    specials = "{% for m in messages %}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    for template in (CHAT, specials, "{{ messages | tojson(indent=2) }}"):
        chat.tokenizer.chat_template = template
        for messages in (ASK, TALK):
            expected = chat.tokenizer.apply_chat_template(
                [*messages], add_generation_prompt=True, return_dict=True
            )
            assert list(chat.tokenize(Prompt(0, messages, "5")).token_ids) == expected["input_ids"]


def test_template_gets_the_kwargs_of_the_chat_and_the_special_tokens(chat):
    chat.tokenizer.chat_template = (
        "{{ eos_token }}{% if enable_thinking is false %}no thinking{% endif %}"
    )
    assert (
        replace(chat, template_kwargs={"enable_thinking": False}).render(ASK) == "<eos>no thinking"
    )


def test_template_that_fails_on_one_prompt_ends_the_run_before_it_is_made(tmp_path):
    failing = (
        "{% if messages[0].content == 'xxx?' %}{{ raise_exception('no x') }}{% endif %}" + CHAT
    )
    (tmp_path / "chat.jinja").write_text(failing)
    model = save_tiny(tmp_path / "model")
    settings = tiny_settings(
        model, tmp_path / "runs", model={"chat_template": str(tmp_path / "chat.jinja")}
    )
    with pytest.raises(
        SettingsError, match=r"prompt 3 of .*: the chat template cannot render it: no x"
    ):
        train(settings)
    assert not (tmp_path / "runs").exists()


def test_token_that_ends_a_turn_in_the_template_ends_completions(caplog):
    """A base model with the template of a chat model: neither its tokenizer nor its settings know <stop>."""
    model, tokenizer = tiny_model(eos_token_id=1), tiny_tokenizer()
    tokenizer.chat_template = TURNS.replace("<eos>", "<stop>")
    chat = Chat.from_model(model, tokenizer)
    assert (chat.eos_ids, chat.end_id) == ({1, 2}, 2)
    assert "completions also end at <stop>" in caplog.text
    tokenizer.chat_template = CHAT
    assert (Chat.from_model(model, tokenizer).eos_ids, chat.end_id) == ({1}, 1)


def test_template_that_opens_no_turn_of_the_assistant_gives_a_warning(caplog):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>\n{% endfor %}"
    )
    Chat.from_model(tiny_model(), tokenizer)
    assert "opens no turn for the assistant: completions begin after <eos>" in caplog.text


def test_prefill_keeps_its_white_space_and_gets_no_empty_thought(chat):
    """The template trims, and writes a thought before every answer, as Qwen3's does."""
    chat.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m['content'] | trim }}<eos>{% endfor %}"
    )
    for said, text in (("<think>\n", "<think>\n"), ("It is ", "<think>\n\n</think>\n\nIt is ")):
        assert (
            chat.render([*ASK, {"role": "assistant", "content": said}])
            == f"user:2 + 3?<eos>assistant:{text}"
        )


def test_text_is_decoded_as_it_was_sampled(chat):
    chat.tokenizer.clean_up_tokenization_spaces = True
    for text in ("a , b .", "do n't", " x ! "):
        assert chat.decode(chat.encode(text, add_special_tokens=False)) == text


def test_prefix_is_what_the_prompt_begins_the_answer_with(chat):
    told = (*ASK, {"role": "assistant", "content": "It is "})
    open_turn = TURNS.replace("assistant: ", "{% if add_generation_prompt %}assistant: {% endif %}")
    for ending, messages, prefix in [
        ("", ASK, ""),
        ("<think>{{ '\\n' }}", ASK, "<think>\n"),
        ("<eos>", ASK, ""),
        ("", told, "It is "),
    ]:
        chat.tokenizer.chat_template = open_turn + ending
        assert chat.tokenize(Prompt(0, messages, "5")).prefix == prefix


def test_tag_that_the_template_opens_counts_for_the_format(tmp_path):
    (tmp_path / "chat.jinja").write_text(CHAT + "<think>")
    task = {"rewards": [{"name": "form", "reward": "format", "options": {"pattern": "<think>.*"}}]}
    sections: dict[str, Any] = {
        "model": {"chat_template": str(tmp_path / "chat.jinja")},
        "task": task,
    }
    run = train(tiny_settings(save_tiny(tmp_path / "model"), tmp_path, **sections)).run
    assert {row["reward_form"] for row in load_rollouts(run)} == {1.0}
    assert verify_run(run).differences == []


# ---- a template with the date ----

DATED = "{{ strftime_now('%d %b %Y') }} " + CHAT


def test_date_of_a_template_is_that_of_the_start(chat):
    chat.tokenizer.chat_template = DATED
    late = replace(chat, started=datetime(2026, 11, 25, 23, 59, tzinfo=UTC))
    assert late.render(ASK).startswith("25 Nov 2026 user:")
    assert pin_date('{{ strftime_now("%Y") }}', late.started) == "{{ '2026' }}"


class Yesterday(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.now(tz) - timedelta(days=1)


def test_run_that_resumes_on_another_day_keeps_its_prompts(tmp_path, monkeypatch):
    (tmp_path / "chat.jinja").write_text(DATED)
    model: dict[str, Any] = {"chat_template": str(tmp_path / "chat.jinja")}
    given = tiny_settings(
        save_tiny(tmp_path / "model"), tmp_path, model=model, checkpoint={"save_every": 1}
    )
    with monkeypatch.context() as patch:
        patch.setattr("lagrpo.training.build.datetime", Yesterday)
        whole = train(given).run
    stopped = cut_to(whole, 2, tmp_path / "cut")
    go_on(stopped)
    assert load_rollouts(stopped) == load_rollouts(whole)
    assert verify_run(stopped).differences == []
