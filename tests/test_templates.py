"""Chat templates: what transformers renders, what lagrpo reads from them, and what becomes of a
template that fails or leaves a message out."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import talkers
from running import tiny_settings
from test_resume import cut_to, go_on
from tiny import CHAT, TURNS, tiny_model, tiny_policy, tiny_tokenizer

from lagrpo.errors import SettingsError
from lagrpo.lifecycle.run import train
from lagrpo.model import chat as model_chat
from lagrpo.model.chat import Chat, TemplateError
from lagrpo.model.replies import Replies
from lagrpo.rewards import builtin
from lagrpo.rewards.reward import Reward, Rewards
from lagrpo.runs import load_rollouts
from lagrpo.startup.build_episodes import check_call_format
from lagrpo.startup.build_tasks import warn_of_formats
from lagrpo.tasks.environments import Tools
from lagrpo.types import JsonObject, Prompt
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


@pytest.mark.parametrize(
    "body", ["", "x", "{% set y = i %}"], ids=["empty loop", "with a text", "with a statement"]
)
def test_template_that_does_not_end_is_an_error(chat, monkeypatch, body):
    monkeypatch.setattr(model_chat, "RENDERING_SECONDS", 0.05)
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "ijk")
    chat.tokenizer.chat_template = loops + body + "{% endfor %}" * 3
    with pytest.raises(TemplateError, match="takes more than"):
        chat.render(ASK)


def test_template_gets_the_kwargs_of_the_chat_and_the_special_tokens(chat):
    chat.tokenizer.chat_template = (
        "{{ eos_token }}{% if enable_thinking is false %}no thinking{% endif %}"
    )
    assert (
        replace(chat, template_kwargs={"enable_thinking": False}).render(ASK) == "<eos>no thinking"
    )


def test_template_that_fails_on_one_prompt_ends_the_run_before_it_is_made(model, tmp_path):
    failing = (
        "{% if messages[0].content == 'xxx?' %}{{ raise_exception('no x') }}{% endif %}" + CHAT
    )
    (tmp_path / "chat.jinja").write_text(failing, encoding="utf-8")
    settings = tiny_settings(
        model, tmp_path / "runs", model={"chat_template": str(tmp_path / "chat.jinja")}
    )
    with pytest.raises(
        SettingsError, match=r"prompt 3 of .*: the chat template cannot render it: no x"
    ):
        train(settings)
    assert not (tmp_path / "runs").exists()


def test_token_that_ends_a_turn_in_the_template_ends_completions(caplog):
    """A base model with the template of a chat model: neither its tokenizer nor its settings know
    <stop>."""
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
        "{% for m in messages %}{{ m['role'] }}:"
        "{% if m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m['content'] | trim }}<eos>{% endfor %}"
    )
    for prefill, text in (("<think>\n", "<think>\n"), ("It is ", "<think>\n\n</think>\n\nIt is ")):
        assert (
            chat.render([*ASK, {"role": "assistant", "content": prefill}])
            == f"user:2 + 3?<eos>assistant:{text}"
        )


def test_prefill_does_not_open_a_thought_that_the_template_has_opened(chat):
    chat.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:"
        "{% if m['role'] == 'assistant' %}<think>{{ '\\n' }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    prefill = {"role": "assistant", "content": "<think>\nFirst"}
    assert chat.render([*ASK, prefill]) == "user:2 + 3?assistant:<think>\nFirst"


@pytest.mark.parametrize(
    ("template", "text", "tokens"),
    [
        pytest.param(None, "2+3", "2+3", id="base model"),
        pytest.param(None, "2+3<eos>", "2+3<eos>", id="end in the data"),
        pytest.param(CHAT, "2+3", "user: 2+3\nassistant:", id="chat template"),
        pytest.param("{{ messages[0].content }}<eos>", "2+3", "2+3<eos>", id="end in the template"),
    ],
)
@pytest.mark.parametrize("special", ["$A <eos>", "<stop> $A <eos>", "<stop> $A"])
def test_prompt_does_not_end_with_the_end_token_of_the_tokenizer(
    chat, template, text, tokens, special
):
    from tokenizers.processors import TemplateProcessing

    ids = [("<eos>", 1), ("<stop>", 2)]
    chat.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=special, special_tokens=ids
    )
    chat.tokenizer.chat_template = template
    prompt = chat.tokenize(Prompt(0, ({"role": "user", "content": text},), "5"))
    beginning = "<stop>" if template is None and special.startswith("<stop>") else ""
    assert chat.tokenizer.decode(prompt.token_ids) == beginning + tokens


CALCULATOR = {"type": "function", "function": {"name": "calc", "parameters": {}}}
WITH_TOOLS = "{{ tools | tojson if tools }}" + CHAT


def test_tools_of_a_prompt_are_rendered_unless_an_environment_has_others(chat):
    chat.tokenizer.chat_template = WITH_TOOLS
    prompt = Prompt(0, ASK, "5", tools=(CALCULATOR,))
    tokens = chat.tokenize(prompt).token_ids
    assert chat.tokenizer.decode(tokens).startswith(json.dumps([CALCULATOR]))
    other = {"type": "function", "function": {"name": "search"}}
    tokens = chat.tokenize(prompt, [other]).token_ids
    assert chat.tokenizer.decode(tokens).startswith(json.dumps([other]))


@pytest.mark.parametrize("template", [CHAT, None], ids=["template", "no template"])
def test_tools_of_a_prompt_that_are_not_rendered_are_rejected(chat, template):
    chat.tokenizer.chat_template = template
    with pytest.raises(ValueError, match="'calc'"):
        chat.tokenize(Prompt(0, ASK, "5", tools=(CALCULATOR,)))


@pytest.mark.parametrize(
    ("message", "hidden"),
    [
        pytest.param({"role": "user", "name": "Bob"}, "name", id="name of a user"),
        pytest.param({"role": "user", "language": "en"}, "language", id="unknown key"),
        pytest.param({"role": "user", "name": None}, None, id="null"),
        pytest.param({"role": "tool", "name": "calc"}, None, id="name of a tool"),
        pytest.param({"role": "assistant", "reasoning_content": "hm"}, None, id="earlier thought"),
    ],
)
def test_key_of_a_message_that_the_template_does_not_show_gives_a_warning(
    chat, caplog, message, hidden
):
    prompt = chat.tokenize(Prompt(0, ({**message, "content": "2"}, *ASK), "5"))
    assert chat.warn_if_unusual(prompt, "line 1") == (hidden is not None)
    assert (f"{hidden!r}" in caplog.text) == (hidden is not None)


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
        ("[THINK]", ASK, "[THINK]"),
        ("<seed:think>", ASK, "<seed:think>"),
        ("<|channel|>analysis<|message|>", ASK, "<|channel|>analysis<|message|>"),
        ("<think></think>", ASK, ""),
        ("<eos>", ASK, ""),
        ("", told, "It is "),
    ]:
        chat.tokenizer.chat_template = open_turn + ending
        assert chat.tokenize(Prompt(0, messages, "5")).prefix == prefix


def test_later_turns_begin_as_their_replies_end(chat):
    pieces = [("7<eos>", True), ("user: no\nassistant: <think>\n", False), ("8", True)]
    pieces += [("user: no\nassistant: ", False), ("9", True)]
    token_ids: list[int] = []
    sampled: list[bool] = []
    for text, is_sampled in pieces:
        ids = chat.encode(text, add_special_tokens=False)
        token_ids += ids
        sampled += [is_sampled] * len(ids)
    assert chat.find_later_prefixes(token_ids, sampled) == ["<think>\n", ""]
    assert chat.find_later_prefixes(token_ids[:2], sampled[:2]) == []


def test_special_tokens_are_in_texts_except_those_that_end_or_pad(chat):
    tokenizer = chat.tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<bot>"]})
    ids = tokenizer("<think>2</think>3<stop><pad><eos>", add_special_tokens=False)["input_ids"]
    assert len(ids) == 7
    assert chat.decode(ids) == "<think>2</think>3"
    for tag, prefix in (("<think>", "<think>"), ("<bot>", "")):  # <bot> is the header of a turn
        tokenizer.chat_template = CHAT + tag
        assert replace(chat, vocabulary=200).tokenize(Prompt(0, ASK, "5")).prefix == prefix


@pytest.mark.parametrize(
    ("reward", "end", "ending", "warned"),
    [
        pytest.param({}, "<eos>", "", False, id="attainable"),
        pytest.param({}, "<eos>", "<think>\n", False, id="opened by the template"),
        pytest.param({}, "</answer>", "", True, id="tag that ends completions"),
        pytest.param({"tags": ["answer"]}, "<eos>", "<think>\n", True, id="thinking without a tag"),
        pytest.param({"pattern": r"\d+<eos>"}, "<eos>", "", True, id="pattern with the end"),
        pytest.param({"pattern": r"\d+"}, "<eos>", "", False, id="pattern"),
    ],
)
def test_format_that_no_completion_can_have_gives_a_warning(
    chat, caplog, reward, end, ending, warned
):
    tokenizer = chat.tokenizer
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    tokenizer.chat_template = CHAT + ending
    end_id = tokenizer.convert_tokens_to_ids(end)
    chat = replace(chat, vocabulary=200, eos_ids=frozenset({end_id}))
    prompt = chat.tokenize(Prompt(0, ASK, "5"))
    rewards = Rewards((Reward(partial(builtin.format, **reward), name="form"),))
    warn_of_formats(rewards, prompt, chat)
    assert ("the reward 'form'" in caplog.text) == warned


def test_tag_that_the_template_opens_counts_for_the_format(model, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHAT + "<think>", encoding="utf-8")
    task = {"rewards": [{"name": "form", "reward": "format", "options": {"pattern": "<think>.*"}}]}
    sections: JsonObject = {
        "model": {"chat_template": str(tmp_path / "chat.jinja")},
        "task": task,
    }
    run = train(tiny_settings(model, tmp_path, **sections)).run
    assert {row["reward_form"] for row in load_rollouts(run)} == {1.0}
    assert verify_run(run, trust_run_code=True).differences == []


# Messages that a template leaves out, and those that it may change

CHATML = (  # as Qwen2.5's: other roles are left out, arguments are written as JSON
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}{{ '<tool_response>' + m.content }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMS = CHATML.replace("(m.content or '')", "(m.content or '') | trim")
FORGETS = CHATML.replace("(m.content or '')", "(m.content or '').split('</think>')[-1].lstrip()")
AS_JSON = CHATML.replace("'<tool_response>' + m.content", "'<tool_response>' + m.content | tojson")
MERGES = (  # as Gemma's and Mistral's: the system prompt stands in the last turn of the user
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}[{{ m.role }}]{{ system if loop.last else '' }}{{ m.content }}{% endfor %}"
)
ANSWERS = CHATML.replace(  # as Hunyuan's: the answer without its tags
    "(m.content or '')", "(m.content or '').replace('<answer>', '').replace('</answer>', '')"
)
SWITCHED = CHATML.replace("(m.content or '')", "(m.content or '').replace('/no_think', '')")

SYSTEM = {"role": "system", "content": "Be brief. /no_think"}
CALL = {"function": {"name": "add", "arguments": {"x": 2}}}
CALLED = (
    *ASK,
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sum":\n5}'},
    *ASK,
)


def told(text: str) -> tuple[JsonObject, ...]:
    return (*ASK, {"role": "assistant", "content": text}, *ASK)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        pytest.param(TRIMS, ({"role": "user", "content": " 2 + 3?\n"},), id="trimmed, as Llama 3"),
        pytest.param(FORGETS, told("<think>\nhm\n</think>\n\n5 "), id="thinking dropped, as Qwen3"),
        pytest.param(MERGES, (SYSTEM, *told("5")), id="system merged into a later turn"),
        pytest.param(AS_JSON, CALLED, id="tool result as JSON, as Llama 3.2"),
        pytest.param(ANSWERS, told("<answer>5</answer>"), id="answer without its tags"),
        pytest.param(SWITCHED, (SYSTEM, *ASK), id="switch of thinking removed, as SmolLM3"),
        pytest.param(CHATML, told("2 + 3?"), id="three equal texts"),
        pytest.param(CHATML, told(""), id="empty answer"),
    ],
)
def test_message_that_a_template_may_change_so_is_asked(chat, template, messages):
    chat.tokenizer.chat_template = template
    prompt = Prompt(0, messages, "5")
    assert chat.decode(chat.tokenize(prompt).token_ids) == chat.render(messages)


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        pytest.param(
            CHATML,
            ({"role": "developer", "content": "In French."}, *ASK),
            r"'In French\.' of its message 1 \(role 'developer'\)",
            id="developer",
        ),
        pytest.param(
            CHATML,
            ({"role": "human_user", "content": "2 + 3?"},),
            r"'2 \+ 3\?' of its message 1 \(role 'human_user'\)",
            id="only question",
        ),
        pytest.param(
            CHATML,
            (*ASK, {"role": "function", "content": "5"}, *ASK),
            r"'5' of its message 2 \(role 'function'\)",
            id="result of a function",
        ),
        pytest.param(
            CHAT, CALLED, r"'add' of its message 2 \(role 'assistant'\)", id="call without words"
        ),
        pytest.param(
            MERGES.replace("system if", "'' if"),
            (SYSTEM, *ASK),
            r"'Be brief\.' of its message 1 \(role 'system'\)",
            id="system prompt",
        ),
        pytest.param(
            "{{ messages[-1].content }}",
            told("5"),
            r"'5' of its message 2 \(role 'assistant'\)",
            id="history",
        ),
        pytest.param(
            "{{ messages[-1].content[:3] }}",
            ASK,
            r"'2 \+ 3\?' of its message 1 \(role 'user'\)",
            id="end of a text",
        ),
        pytest.param(
            None, CALLED, r"'add' of its message 2 \(role 'assistant'\)", id="no chat template"
        ),
    ],
)
def test_message_that_is_not_in_the_prompt_is_rejected_with_its_role(
    chat, template, messages, lost
):
    chat.tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"lacks {lost}"):
        chat.tokenize(Prompt(0, messages, "5"))


def test_run_with_a_role_that_the_template_drops_ends_before_it_is_made(model, tmp_path):
    developer = {"role": "developer", "content": "Answer in French."}
    rows = [{"prompt": [*ASK], "answer": "5"}, {"prompt": [developer, *ASK], "answer": "5"}]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    (tmp_path / "chat.jinja").write_text(CHATML, encoding="utf-8")
    task = {"name": "custom", "data": str(tmp_path / "rows.jsonl"), "rewards": ["exact"]}
    for rollout in ({}, {"overlong_prompts": "drop"}):
        settings = tiny_settings(
            model,
            tmp_path / "runs",
            model={"chat_template": str(tmp_path / "chat.jinja")},
            task={**task, "options": {"test_split": "rows", "train_split": "rows"}},
            rollout=rollout,
        )
        with pytest.raises(SettingsError, match=r"rows\.jsonl, line 2.*role 'developer'"):
            train(settings)
    assert not (tmp_path / "runs").exists()


def test_reply_of_an_environment_that_the_template_drops_is_an_error(chat):
    chat.tokenizer.chat_template = TURNS.replace(
        "{{ m['content'] }}", "{{ m['content'] if m['role'] != 'judge' }}"
    )
    with pytest.raises(ValueError, match=r"lacks 'wrong' of its message 1 \(role 'judge'\)"):
        Replies(chat).tokens([{"role": "judge", "content": "wrong"}])


def test_arguments_are_written_as_the_template_wants_them(chat):
    """Qwen's template writes an object as JSON; DeepSeek's appends a text."""
    joining = CHATML.replace(
        "{{ call.function.arguments | tojson }}", "{{ 'f ' + call.function.arguments }}"
    )
    for template in (CHATML, joining):
        chat.tokenizer.chat_template = template
        assert 'add f {"x": 2}<' in chat.render(CALLED).replace("add {", "add f {")


# Calls as a template writes them

CODER = (  # as Qwen3-Coder's
    "{% for t in tools or [] %}<name>{{ t.function.name }}</name>{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<eos>\n{% endfor %}assistant: "
)
CALL_WRITTEN = CODER[CODER.index("<tool_call>") : CODER.index("{% endfor %}<eos>")]


def written(call: str) -> str:
    """The template with calls in another format."""
    return CODER.replace(CALL_WRITTEN, call)


@pytest.mark.parametrize(
    ("template", "is_read"),
    [
        pytest.param(CODER, True, id="Qwen3-Coder"),
        pytest.param(CODER + "<think>\n", True, id="with an opened thought"),
        pytest.param(
            written("<tool_call>{{ c.function | tojson }}</tool_call>"), True, id="Hermes"
        ),
        pytest.param(
            written(
                '{"name": "{{ c.function.name }}", '
                '"parameters": {{ c.function.arguments | tojson }}}'
            ),
            True,
            id="Llama 3",
        ),
        pytest.param(
            written(
                "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments | items %}"
                "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"
            ),
            False,
            id="GLM-4.5",
        ),
        pytest.param(written("[TOOL_CALLS][{{ c.function | tojson }}]"), False, id="Mistral"),
        pytest.param(
            written(
                "<tool_calls_begin>{{ c.function.name }}\n```json\n"
                "{{ c.function.arguments | tojson }}\n```<tool_calls_end>"
            ),
            False,
            id="DeepSeek",
        ),
        pytest.param(written("<|python_tag|>{{ c.function.name }}.call(x=1)"), False, id="Python"),
        pytest.param(written(""), True, id="calls left out"),
    ],
)
def test_template_whose_calls_are_not_read_is_rejected(chat, template, is_read):
    chat.tokenizer.chat_template = template
    tools = Tools({"add": talkers.add})
    if is_read:
        check_call_format(chat, tools, tools.schemas())
    else:
        with pytest.raises(ValueError, match="writes a call"):
            check_call_format(chat, tools, tools.schemas())


# A template with the date

DATED = "{% set format = '%d %b %Y' %}{{ strftime_now(format) }} " + CHAT


def test_date_of_a_template_is_that_of_the_start(chat):
    chat.tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }} " + CHAT
    late = replace(chat, started=datetime(2026, 11, 25, 23, 59, tzinfo=UTC))
    assert late.render(ASK).startswith("25 Nov 2026 user:")
    in_variable = "{% set format = '%d %b' %}{{ strftime_now(format) }} " + CHAT
    late.tokenizer.chat_template = in_variable
    assert late.render(ASK).startswith("25 Nov user:")
    early = replace(chat, started=datetime(2025, 1, 2, tzinfo=UTC))
    assert early.render(ASK).startswith("02 Jan user:")


class Yesterday(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.now(tz) - timedelta(days=1)


def test_run_that_resumes_on_another_day_keeps_its_prompts(model, tmp_path, monkeypatch):
    (tmp_path / "chat.jinja").write_text(DATED, encoding="utf-8")
    sections: JsonObject = {"chat_template": str(tmp_path / "chat.jinja")}
    run_settings = tiny_settings(model, tmp_path, model=sections, checkpoint={"save_every": 1})
    with monkeypatch.context() as patch:
        patch.setattr("lagrpo.startup.build_policy.datetime", Yesterday)
        uninterrupted = train(run_settings).run
    stopped = cut_to(uninterrupted, 2, tmp_path / "cut")
    go_on(stopped)
    assert load_rollouts(stopped) == load_rollouts(uninterrupted)
    assert verify_run(stopped, trust_run_code=True).differences == []
