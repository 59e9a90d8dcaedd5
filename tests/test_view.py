"""`lagrpo view`: what the page of a run holds, that no text of a run gets out of its place, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from made_runs import HOSTILE, fill, fill_large, group, make_run, metrics, row, save_tokenizer
from running import tiny_settings
from test_cli import lagrpo as command
from tiny import save_tiny

import lagrpo
from lagrpo.errors import SettingsError
from lagrpo.runs import RunNotFoundError, load_rollouts
from lagrpo.runs.lock import locked
from lagrpo.view import meanings, rollouts
from lagrpo.view.command import view, write_page
from lagrpo.view.data import collect, take_stamp
from lagrpo.view.page import make_page
from lagrpo.view.payload import Arrays, unpack
from lagrpo.view.sample import TOKENS, Size, choose, share, within_tokens
from lagrpo.view.serve import Server, Source
from lagrpo.view.vocabulary import fits, token_texts


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real run of a tiny model, with v = 2."""
    root = tmp_path_factory.mktemp("trained")
    model = save_tiny(root / "model")
    settings = tiny_settings(model, root / "runs", schedule={"v": 2}, run={"name": "one", "entropy": True})
    return lagrpo.train(settings).run


def sought(pattern: str, text: str) -> re.Match[str]:
    """The first place where a pattern is found, which must be there."""
    found = re.search(pattern, text)
    assert found, f"no {pattern} in {text[:200]}"
    return found


def columns(packed: bytes, number: int = 0):
    """A run in the page, and its arrays by name."""
    header, arrays = unpack(packed)
    run = header["runs"][number]
    return run, {name: arrays[place] for name, place in run["rollouts"]["columns"].items()}


# What the page holds


def test_the_page_holds_the_completions_of_a_real_run(trained):
    run, found = columns(collect([trained], 10_000))
    rows, r = load_rollouts(trained), run["rollouts"]
    assert len(rows) == 3 * 2 * 4
    assert r["texts"] == [one["text"] for one in rows]
    assert found["reward"].tolist() == [one["reward"] for one in rows]
    assert found["lag"].tolist() == [one["lag"] for one in rows]
    assert np.allclose(found["advantage"], [one["advantage"] for one in rows])
    starts = found["first_token"]
    for c, one in enumerate(rows):
        own = slice(starts[c], starts[c + 1])
        assert [r["ids"][place] for place in found["token"][own]] == one["token_ids"]
        assert np.abs(found["logp"][own] / 1000 - np.array(one["logp_alpha"])).max() <= 0.0005001
        assert np.abs(found["logp_k"][own] / 1000 - np.array(one["logp_k"])).max() <= 0.0005001
        assert sum(one["logp_k"]) - sum(one["logp_alpha"]) == pytest.approx(one["log_ratio"], abs=1e-4)
        unknown = [rollouts.UNKNOWN] * len(one["token_ids"])
        entropy = [round(1000 * h) for h in one["entropy"]] if one["entropy"] else unknown
        assert np.abs(found["entropy"][own] - np.array(entropy)).max() <= 1
        assert found["version"][own].tolist() == one["versions"]
        tokens = "".join(r["vocabulary"][place] for place in found["token"][own])
        assert re.sub("<pad>|<eos>|<stop>", "", tokens) == one["text"]
    assert any(one["entropy"] for one in rows)
    assert found["group_batch"].tolist() == [1, 1, 2, 2, 3, 3]
    assert found["group_first"].tolist() == list(range(0, 25, 4))
    assert [[int(number) for number in batch] for batch in r["batches"]] == [
        [1, 1, 0, 8, 8],
        [2, 1, 1, 8, 8],
        [3, 1, 2, 8, 8],
    ]


def test_the_page_holds_metrics_events_settings_and_evaluations_of_a_real_run(trained):
    header, _ = unpack(collect([trained], 10_000))
    run = header["runs"][0]
    assert run["metrics"]["batch"] == [1, 2, 3]
    assert run["status"][0] == "finished"
    assert run["total"] == 3
    assert [event["reason"] for event in run["events"] if event["event"] == "weight_sync"] == ["start", "schedule"]
    assert run["settings"]["schedule.v"] == 2
    assert header["settings"]["schedule.v"][1] == 1
    assert [one["name"] for one in run["evaluations"]["summaries"]] == ["before", "after"]
    assert [len(rows) for rows in run["evaluations"]["rows"]] == [2, 2]
    assert run["notes"] == []


def test_every_metric_of_a_real_run_has_a_meaning(trained):
    run, _ = columns(collect([trained], 0))
    known = {name for room in meanings.METRICS.values() for name in room}
    assert set(run["metrics"]) - known == set()
    assert known - set(run["metrics"]) == set()


def test_every_setting_has_a_meaning(trained):
    header, _ = unpack(collect([trained], 0))
    assert set(header["runs"][0]["settings"]) - set(header["settings"]) == set()
    assert [name for name, (text, _) in header["settings"].items() if not text] == ["model.lora"]  # a section in one


def test_several_runs_are_told_apart_by_name_or_by_path(tmp_path):
    runs = [make_run(tmp_path / "x", "same"), make_run(tmp_path / "y", "same"), make_run(tmp_path, "other")]
    header, _ = unpack(collect([run.path for run in runs], 10))
    assert [run["name"] for run in header["runs"]] == [
        str(tmp_path / "x" / "same"),
        str(tmp_path / "y" / "same"),
        "other",
    ]


def test_completions_may_lack_what_was_measured(tmp_path):
    run = make_run(tmp_path)
    measured = row("ab", 1.0, logp_k=[-0.5, None], entropy=[0.25, None], sampled=[True, False])
    run.record_rollouts(1, [measured, row("cd", 0.0, completion=1, logp_k=None)])
    _, found = columns(collect([run.path], 100))
    assert found["logp_k"].tolist() == [-500, *[rollouts.UNKNOWN] * 3]
    assert found["entropy"].tolist() == [250, *[rollouts.UNKNOWN] * 3]


def test_groups_are_told_apart_where_one_prompt_is_asked_twice(tmp_path):
    run = make_run(tmp_path)
    run.record_rollouts(1, group(1, [1.0, 0.0]) + group(1, [0.0, 0.0]) + group(1, [1.0], epoch=1))
    _, found = columns(collect([run.path], 100))
    assert found["group_first"].tolist() == [0, 2, 4, 5]
    assert found["group_prompt"].tolist() == [0, 0, 0]


def test_unknown_numbers_and_context_stay_unknown(tmp_path):
    run = make_run(tmp_path)
    odd = row("ab", None, lag=None, log_ratio=None, sigma=None, logp_alpha=[None, -40.0], sampled=[True, False])
    run.record_rollouts(1, [odd, row("", 0.0, completion=1)])
    made, found = columns(collect([run.path], 100))
    assert found["logp"].tolist() == [rollouts.UNKNOWN, -32767]
    assert found["sampled"].tolist() == [1, 0]
    assert np.isnan([found[name][0] for name in ("reward", "lag", "log_ratio", "sigma", "advantage")]).all()
    assert found["first_token"].tolist() == [0, 2, 2]
    assert made["rollouts"]["codes"]["outcome"] == ["unscored", "scored"]


# Tokens


def test_tokens_are_ids_where_there_is_no_tokenizer_or_another_one(tmp_path):
    run = fill(make_run(tmp_path))
    made, _ = columns(collect([run.path], 100))
    assert made["rollouts"]["vocabulary"] is None
    assert "not on this machine" in made["rollouts"]["vocabulary_note"]
    save_tokenizer(run)
    made, _ = columns(collect([run.path], 100))
    assert "a" in made["rollouts"]["vocabulary"]
    run.record_rollouts(5, [row("abc", 1.0) | {"text": "xyz"}])
    made, _ = columns(collect([run.path], 1))
    assert "gives other texts" in made["rollouts"]["vocabulary_note"]


def test_a_tokenizer_file_that_is_none_is_left_alone(tmp_path):
    run = fill(make_run(tmp_path))
    save_tokenizer(run)
    (run.path / "weights" / "final" / "tokenizer.json").write_text('{"model": 3}')
    made, _ = columns(collect([run.path], 100))
    assert made["rollouts"]["vocabulary"] is None


def test_token_texts_keep_spaces_and_say_the_bytes_of_parts_of_a_character():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate(alphabet)} | {"Ġhi": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    euro = [vocabulary[letter] for letter in "âĤ¬"]
    assert token_texts(tokenizer, [256, vocabulary["a"], *euro]) == [" hi", "a", "<0xE2>", "<0x82>", "<0xAC>"]
    assert fits(tokenizer, [euro], ["€"])
    assert not fits(tokenizer, [euro], ["e"])


# How much of a run is in the page


def test_a_large_run_is_sampled_in_whole_groups_from_its_first_batch_to_its_last():
    sizes = {batch: Size(64, 6400) for batch in range(1, 101)}
    assert choose(sizes, 6400) == dict.fromkeys(range(1, 101), 64)
    chosen = choose(sizes, 640)
    assert (min(chosen), max(chosen), len(chosen), sum(chosen.values())) == (1, 100, 20, 640)
    assert choose(sizes, 5) == {100: 5}
    assert choose(sizes, 0) == choose({}, 5) == {}


def test_what_a_small_run_leaves_the_others_get():
    assert share([10, 500, 900], 610) == [10, 300, 300]
    assert share([1, 1], 10) == [1, 1]
    assert within_tokens(Size(1000, TOKENS * 10), 500) == 100
    assert within_tokens(Size(1000, TOKENS), 500) == 500


def test_what_is_left_out_is_counted(tmp_path):
    run = fill(make_run(tmp_path))
    made, found = columns(collect([run.path], 32))
    r = made["rollouts"]
    assert r["completions_on_disk"] == 48
    assert len(r["texts"]) == 24
    assert [[int(n) for n in batch] for batch in r["batches"]] == [[1, 1, 0, 12, 12], [4, 2, 3, 12, 12]]
    assert found["group_first"].tolist() == [0, 4, 8, 12, 16, 20, 24]


def test_a_group_is_never_cut(tmp_path):
    run = make_run(tmp_path)
    run.record_rollouts(1, group(1, [0.0, 1.0, 0.0]) + group(2, [0.0, 1.0, 0.0]))
    for most, kept in ((6, 6), (5, 3), (3, 3), (1, 3)):
        _, found = columns(collect([run.path], most))
        assert len(found["reward"]) == kept


def test_texts_of_evaluations_are_left_out_from_the_middle(tmp_path):
    from made_runs import evaluate

    run = make_run(tmp_path)
    for number, name in enumerate(("a", "b", "c", "d")):
        evaluate(run, name, number, {1: [1.0, 0.0]})
    made, _ = columns(collect([run.path], 4))
    assert ["texts" in rows[0] for rows in made["evaluations"]["rows"]] == [True, False, False, True]


def test_ten_thousand_completions_are_a_few_megabytes(tmp_path):
    run = fill_large(make_run(tmp_path), batches=10, prompts=10, G=10, tokens=30)
    packed = collect([run.path], 1000)
    _, found = columns(packed)
    assert (len(found["reward"]), len(found["token"])) == (1000, 30_000)
    assert len(packed) < 30_000 * 4  # bytes a token: random letters cannot be packed, nor can their log-probs


# Texts of strangers


def hostile_run(root: Path):
    run = make_run(root, "a<b>&'\"<script>", task={"system_prompt": HOSTILE.replace("\x00", "")})
    run.record(metrics(1))
    run.record_event("warning", 1, text=HOSTILE)
    rows = group(1, [1.0, 0.0, None], prompt_text=HOSTILE, gold=json.dumps(HOSTILE), reason=HOSTILE)
    rows += [row(HOSTILE, 0.5, prompt_key=9)]
    run.record_rollouts(1, rows)
    record = {"prompt_key": 1, "prompt": HOSTILE, "gold": HOSTILE, "samples": 1, "scored": 1, "right": 0}
    run.record_evaluation("before", {"batch": 0}, [record | {"completions": [HOSTILE], "rewards": [0.0]}])
    return run


def test_no_text_of_a_run_becomes_markup(tmp_path):
    run = hostile_run(tmp_path)
    view([run.path], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_bytes().decode("utf-8")
    assert "planted" not in page
    assert "onerror" not in page
    assert page.count("<script") == page.count("</script>") == 3
    assert page.count("</title>") == page.count("</style>") == 1
    assert "a&lt;b&gt;&amp;&#x27;&quot;&lt;script&gt; · lagrpo view</title>" in page
    made, _ = columns(base64.b64decode(sought(r'id="data">([^<]*)<', page)[1]))
    assert made["rollouts"]["texts"][-1] == HOSTILE
    assert made["rollouts"]["prompts"][0][1:] == [HOSTILE, HOSTILE]
    assert made["rollouts"]["codes"]["reason"][0] == HOSTILE
    assert made["events"][0]["text"] == HOSTILE


def test_names_that_are_no_unicode_do_no_harm(tmp_path):
    run = fill(make_run(tmp_path))
    odd = run.path.rename(tmp_path / "bad\udcff\u202e")
    view([odd], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_bytes().decode("utf-8")
    assert "<title>bad?\u202e · lagrpo view</title>" in page
    made, _ = columns(collect([odd], 10))
    assert made["name"] == "bad\ufffd\u202e"


def test_the_policy_allows_the_own_scripts_alone_and_no_network(tmp_path):
    page = make_page(["run"], collect([fill(make_run(tmp_path)).path], 10))
    policy = sought(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    styles = re.findall(r"<style>(.*?)</style>", page, re.S)

    def hashes(texts):
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts)

    assert rules["script-src"] == hashes(scripts)
    assert rules["style-src"] == hashes(styles)
    assert "connect-src 'self'" in make_page(["run"], b"", live=True)


def test_the_scripts_use_nothing_that_turns_text_into_markup():
    folder = Path(lagrpo.view.__file__).parent / "assets"
    own = [path for path in folder.glob("*.js") if path.name != "uplot.js"]
    assert len(own) == 9
    for path in folder.glob("*.js"):
        risky = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", path.read_text()
        )
        assert risky == [], path.name
    for path in own:
        assert max(map(len, path.read_text().splitlines())) <= 120, path.name


def test_secrets_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    run = make_run(tmp_path, task={"system_prompt": "https://me:pw@host/?token=abc hf_verysecret"})
    run.record_event("warning", 1, text="api_key=very-secret in a url")
    run.record_rollouts(1, [row("x", 1.0)])
    made, _ = columns(collect([run.path], 10))
    text = json.dumps(made)
    assert "https://***@host/?token=*** ***" in made["settings"]["task.system_prompt"]
    assert not re.search("verysecret|very-secret|pw@", text)


# Runs that are not whole


def test_a_run_without_anything_says_what_is_missing(tmp_path):
    run = make_run(tmp_path)
    (run.path / "environment.json").unlink()
    made, found = columns(collect([run.path], 10))
    assert made["notes"] == [
        "There are no metrics yet: the first batch is not finished.",
        "There is no environment.json.",
    ]
    assert made["status"] == ["unknown", "no end is on record: the run was killed, or it has only begun"]
    assert len(found["reward"]) == 0
    assert made["evaluations"]["summaries"] == []


def test_torn_last_lines_are_left_out_and_said(tmp_path):
    run = fill(make_run(tmp_path))
    for file in (run.metrics, run.events):
        with file.open("ab") as opened:
            opened.write(b'{"batch": 5, "rew')
    made, _ = columns(collect([run.path], 10))
    assert made["metrics"]["batch"] == [1, 2, 3, 4]
    assert [note.split(" is torn")[0] for note in made["notes"]] == [
        "The last line of metrics.jsonl", "The last line of events.jsonl",
    ]  # fmt: skip


def test_a_run_that_goes_on_and_one_that_was_killed(tmp_path):
    run = fill(make_run(tmp_path))
    with locked(run.path):
        assert columns(collect([run.path], 1))[0]["status"][0] == "going"
        holder = json.loads((run.path / ".lock-holder.json").read_text())
        (run.path / ".lock-holder.json").write_text(json.dumps(holder | {"pid": 2**22 + 1}))
        assert columns(collect([run.path], 1))[0]["status"][0] == "killed"
        (run.path / ".lock-holder.json").write_text(json.dumps(holder | {"host": "elsewhere"}))
        assert columns(collect([run.path], 1))[0]["status"][0] == "unknown"
    assert columns(collect([run.path], 1))[0]["status"][0] == "finished"
    run.record_event("resumed", 4, changed={}, moved={})
    assert columns(collect([run.path], 1))[0]["status"][0] == "unknown"


def test_files_that_killed_writers_left_do_no_harm(tmp_path):
    run = fill(make_run(tmp_path))
    before = take_stamp([run.path])
    (run.path / "rollouts" / ".step-000009.parquet.12-0123abcd.tmp").write_bytes(b"half")
    assert take_stamp([run.path]) == before
    assert len(columns(collect([run.path], 100))[1]["reward"]) == 48


def damage_rollouts(run):
    (run.path / "rollouts" / "step-000002.parquet").write_bytes(b"PAR1 no more")
    return "step-000002.parquet is no whole Parquet file"


def damage_metrics(run):
    run.metrics.write_text('{"batch": 1}\nno json\n{"batch": 3}\n')
    return "metrics.jsonl, line 2: this is not JSON"


def damage_evaluation(run):
    (run.path / "evaluations" / "after.parquet").write_bytes(b"none")
    return "after.parquet is no whole Parquet file"


def damage_summary(run):
    (run.path / "evaluations" / "after.json").write_text("[]")
    return "after.json"


def damage_config(run):
    (run.path / "config.toml").write_text("= no toml")
    return "config.toml"


def damage_environment(run):
    (run.path / "environment.json").write_text("{")
    return "environment.json is damaged"


def damage_lists(run):
    run.record_rollouts(3, [row("abc", 1.0, versions=[0])])
    return "the lists of a completion's tokens differ in length"


@pytest.mark.parametrize(
    "damage",
    [
        damage_rollouts,
        damage_metrics,
        damage_evaluation,
        damage_summary,
        damage_config,
        damage_environment,
        damage_lists,
    ],
)
def test_damaged_files_are_one_line_and_exit_code_2(tmp_path, damage):
    run = fill(make_run(tmp_path))
    expected = damage(run)
    code, out, err = command("view", run.path)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("lagrpo: ")
    assert expected in err
    assert not (run.path / "view.html").exists()


# The command


def test_the_command_writes_a_page_and_says_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = fill(make_run(tmp_path, "one")), fill(make_run(tmp_path, "two"))
    code, out, err = command("view", one.path)
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"{one.path}/view.html \(\d+ kB\): open it in a browser, or copy it anywhere\n", out)
    assert (one.path / "view.html").read_text().startswith("<!doctype html>")
    assert command("view", one.path, two.path)[0] == 0
    assert "<title>one, two · lagrpo view</title>" in (tmp_path / "view.html").read_text()
    assert command("view", one.path, "--out", tmp_path / "deep" / "x.html", "--completions", 0)[0] == 0
    assert (tmp_path / "deep" / "x.html").is_file()
    assert [path.name for path in one.path.iterdir() if path.name.endswith(".tmp")] == []


def test_open_shows_the_file_in_the_browser(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    run = fill(make_run(tmp_path))
    assert command("view", run.path, "--open")[0] == 0
    assert shown == [(run.path / "view.html").as_uri()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "view needs a run: lagrpo view runs/NAME"),
        (["nowhere"], "there is no run at nowhere"),
        (["made", "--completions", "-1"], "--completions is -1: it is a number of completions, 0 or more"),
        (["made", "--out", "made"], "made is a directory: name the file to write, --out made/view.html"),
        (["made", "--out", "made/config.toml/x"], "made/config.toml"),
        (["made", "--serve", "--port", "99999"], "port 99999"),
        (["made/rollouts"], "made/rollouts is not a run: it has no config.toml"),
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    fill(make_run(tmp_path))
    code, out, err = command("view", *words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_run_named_twice_is_shown_once(tmp_path):
    run = fill(make_run(tmp_path))
    view([run.path, run.path / ".." / "made"], tmp_path / "page.html")
    assert "<title>made · lagrpo view</title>" in (tmp_path / "page.html").read_text()


def test_errors_of_the_library_have_their_types(tmp_path):
    run = fill(make_run(tmp_path))
    with pytest.raises(RunNotFoundError, match="no run at"):
        collect([tmp_path / "nowhere"], 10)
    with pytest.raises(SettingsError, match="is a directory"):
        write_page([run.path], b"", tmp_path)
    with pytest.raises(TypeError, match="no arrays of complex128"):
        Arrays().add(np.zeros(1, np.complex128))


# The server


@pytest.fixture
def served(tmp_path):
    run = fill(make_run(tmp_path))
    server = Server(Source([run.path], lambda: collect([run.path], 100)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield run, server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server: Server, path: str, host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_the_server_answers_with_the_page_and_with_newer_data_only(served):
    run, server = served
    assert server.server_address[0] == "127.0.0.1"
    status, headers, page = ask(server, "/")
    assert (status, headers["Content-Type"], headers["X-Frame-Options"]) == (200, "text/html; charset=utf-8", "DENY")
    assert b'<main id="page" data-live>' in page
    status, _, packed = ask(server, "/data")
    stamp = unpack(packed)[0]["stamp"]
    assert ask(server, f"/data?stamp={stamp}")[::2] == (204, b"")
    run.record(metrics(5))
    status, _, packed = ask(server, f"/data?stamp={stamp}")
    assert (status, unpack(packed)[0]["runs"][0]["metrics"]["batch"]) == (200, [1, 2, 3, 4, 5])


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example:{port}", ""])
def test_the_server_refuses_other_names(served, host):
    _, server = served
    status, _, text = ask(server, "/", host.format(port=server.server_port) or " ")
    assert (status, text) == (403, b"this server answers as 127.0.0.1 only\n")
    assert ask(server, "/", f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("path", ["/config.toml", "/../config.toml", "/data/x", "/%2e%2e/metrics.jsonl"])
def test_the_server_has_nothing_else(served, path):
    assert ask(served[1], path)[0] == 404


def test_the_server_stays_up_while_a_run_cannot_be_read(served):
    run, server = served
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(b"no json\n")
    status, _, text = ask(server, "/data?stamp=0")
    assert status == 503
    assert b"metrics.jsonl, line 1" in text
    run.metrics.write_bytes(whole)
    assert ask(server, "/data?stamp=0")[0] == 200


def test_serve_follows_a_run_and_ends_with_ctrl_c_in_one_line(tmp_path):
    run = fill(make_run(tmp_path))
    words = [sys.executable, "-m", "lagrpo", "view", str(run.path), "--serve"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        port = int(sought(r"^http://127\.0\.0\.1:(\d+)/  shows .*made and follows it; Ctrl-C ends", first)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/")
        assert b"<!doctype html>" in connection.getresponse().read()
        connection.close()
        assert (run.path / "view.html").is_file()
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "\nlagrpo: interrupted\n")
