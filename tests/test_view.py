"""`lagrpo view`: what the page of a run holds, that no text of a run gets out of its place, and
what is rejected."""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import socket
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np
import pytest
from made_runs import HOSTILE, evaluate, fill, group, make_run, metrics, row, save_tokenizer, unpack
from running import tiny_settings
from test_cli import lagrpo as command

import lagrpo
from lagrpo.cli import main
from lagrpo.runs import load_rollouts
from lagrpo.runs.directory import HOLDER, RunLockedError, locked
from lagrpo.view.data import UNKNOWN, choose, collect, token_texts
from lagrpo.view.serve import Server, view


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """A real run of a tiny model, with v = 2."""
    root = tmp_path_factory.mktemp("trained")
    settings = tiny_settings(model, root / "runs", schedule={"sync_every": 2}, run={"name": "one"})
    return lagrpo.train(settings).run


def columns(packed: bytes, number: int = 0):
    """A run in the page, and its arrays by name."""
    header, arrays = unpack(packed)
    run = header["runs"][number]
    return run, {name: arrays[index] for name, index in run["rollouts"]["columns"].items()}


# What the page holds


def test_page_holds_the_completions_of_a_real_run(trained):
    run, arrays = columns(collect([trained], 10_000))
    rows, r = load_rollouts(trained), run["rollouts"]
    assert r["texts"] == [one["completion"] for one in rows]
    assert len(rows) == 3 * 2 * 4
    for name in ("reward", "staleness", "advantage"):
        assert np.allclose(arrays[name], [one[name] for one in rows])
    starts = arrays["first_token"]
    for c, one in enumerate(rows):
        tokens_of_completion = slice(starts[c], starts[c + 1])
        assert [r["ids"][entry] for entry in arrays["token"][tokens_of_completion]] == one[
            "token_ids"
        ]
        assert (
            np.abs(
                arrays["rollout_logprobs"][tokens_of_completion] / 1000
                - np.array(one["rollout_logprobs"])
            ).max()
            <= 0.0005001
        )
        assert (
            np.abs(
                arrays["old_logprobs"][tokens_of_completion] / 1000 - np.array(one["old_logprobs"])
            ).max()
            <= 0.0005001
        )
        unknown = [UNKNOWN] * len(one["token_ids"])
        entropy = [round(1000 * h) for h in one["entropy"]] if one["entropy"] else unknown
        assert np.abs(arrays["entropy"][tokens_of_completion] - np.array(entropy)).max() <= 1
        assert arrays["version"][tokens_of_completion].tolist() == one["policy_versions"]
        tokens = "".join(r["vocabulary"][entry] for entry in arrays["token"][tokens_of_completion])
        assert re.sub("<pad>|<eos>|<stop>", "", tokens) == one["completion"]
    assert arrays["group_batch"].tolist() == [1, 1, 2, 2, 3, 3]
    assert arrays["group_first"].tolist() == list(range(0, 25, 4))
    assert r["batches"] == [[1, 0, 8, 8], [2, 1, 8, 8], [3, 2, 8, 8]]


def test_page_holds_metrics_events_settings_and_evaluations_of_a_real_run(trained):
    header, _ = unpack(collect([trained], 10_000))
    run = header["runs"][0]
    assert run["metrics"]["step"] == [1, 2, 3]
    assert (run["status"][0], run["total"], run["notes"]) == ("finished", 3, [])
    assert header["methods"] == [["one", [0]]]
    assert [event["reason"] for event in run["events"] if event["event"] == "weight_sync"] == [
        "start",
        "schedule",
    ]
    assert (
        run["settings"]["schedule.sync_every"],
        header["settings"]["schedule.sync_every"][1],
    ) == (2, 1)
    assert [one["name"] for one in run["evaluations"]["summaries"]] == ["before", "after"]
    assert [len(rows) for rows in run["evaluations"]["rows"]] == [2, 2]
    assert set(run["metrics"]) <= {
        name for metrics in header["metrics"].values() for name in metrics
    }
    assert set(run["settings"]) <= set(header["settings"])


def test_page_knows_which_runs_are_seeds_of_one_method(tmp_path):
    runs = [
        make_run(tmp_path, "plain-seed0", run={"seed": 0}),
        make_run(tmp_path, "other", loss={"recipe": "rloo"}),
        make_run(tmp_path, "plain-seed1", run={"seed": 1}),
    ]
    header, _ = unpack(collect([run.path for run in runs], 100))
    assert header["methods"] == [["plain", [0, 2]], ["other", [1]]]


def test_unknown_numbers_and_context_stay_unknown(tmp_path):
    run = make_run(tmp_path)
    odd = row(
        "ab",
        None,
        staleness=None,
        group_std=None,
        rollout_logprobs=[None, -40.0],
        loss_mask=[True, False],
    )
    odd |= {"old_logprobs": [-0.5, None], "entropy": [0.25, None]}
    run.record_rollouts(
        1,
        [
            odd,
            *(row(text, 0.0, sample_index=n, old_logprobs=None) for n, text in ((1, ""), (2, "c"))),
        ],
    )
    run_data, arrays = columns(collect([run.path], 100))
    assert arrays["rollout_logprobs"].tolist() == [UNKNOWN, -32767, -250]
    assert arrays["old_logprobs"].tolist() == [-500, UNKNOWN, UNKNOWN]
    assert arrays["entropy"].tolist() == [250, UNKNOWN, UNKNOWN]
    assert arrays["sampled"].tolist() == [1, 0, 1]
    assert np.isnan(
        [arrays[name][0] for name in ("reward", "staleness", "log_ratio", "group_std", "advantage")]
    ).all()
    assert run_data["rollouts"]["codes"]["outcome"] == ["unscored", "scored"]


def test_tokens_are_ids_without_the_right_tokenizer(tmp_path):
    run = fill(make_run(tmp_path))
    assert columns(collect([run.path], 100))[0]["rollouts"]["vocabulary"] is None
    save_tokenizer(run)
    assert "a" in columns(collect([run.path], 100))[0]["rollouts"]["vocabulary"]
    (run.path / "weights" / "final" / "tokenizer.json").write_text('{"model": 3}', encoding="utf-8")
    assert columns(collect([run.path], 100))[0]["rollouts"]["vocabulary"] is None


@pytest.mark.parametrize("path", ["~/no-model", "models/no model", "/no-model"])
def test_tokens_are_ids_if_the_directory_of_the_model_is_not_here(tmp_path, path):
    run = fill(make_run(tmp_path, model={"path": path}))
    assert columns(collect([run.path], 100))[0]["rollouts"]["vocabulary"] is None


def test_token_texts_keep_spaces_and_name_parts_of_a_character():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {
        letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    } | {"Ġhi": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    euro = [vocabulary[letter] for letter in "âĤ¬"]
    assert token_texts(tokenizer, [256, vocabulary["a"], *euro]) == [
        " hi",
        "a",
        "<â>",
        "<Ĥ>",
        "<¬>",
    ]


# How much of a run is in the page


def test_page_of_a_large_run_samples_all_its_batches():
    batches = range(1, 101)
    assert choose(batches, 6400) == dict.fromkeys(batches, 64)
    rows_by_batch = choose(batches, 640)
    assert (
        min(rows_by_batch),
        max(rows_by_batch),
        len(rows_by_batch),
        sum(rows_by_batch.values()),
    ) == (1, 100, 20, 640)
    assert choose(batches, 5) == {100: 5}
    assert choose(batches, 0) == choose([], 5) == {}


def test_groups_are_never_cut_and_what_is_left_out_is_counted(tmp_path):
    run = make_run(tmp_path)
    run.record_rollouts(1, group(1, [0.0, 1.0, 0.0, 1.0]) + group(2, [0.0, 1.0, 0.0, 1.0]))
    for most, rows_kept in ((8, 8), (7, 4), (4, 4), (1, 4)):
        run_data, arrays = columns(collect([run.path], most))
        assert len(arrays["reward"]) == rows_kept
        assert run_data["rollouts"]["completions_on_disk"] == 8


def test_page_holds_the_texts_of_the_first_and_last_evaluation_of_each_set(tmp_path):
    run = make_run(tmp_path)
    for batch in (0, 10, 20):
        for name in ("easy", "hard"):
            evaluate(run, f"batch-{batch:06d}.{name}", batch, {1: [0.0, 1.0]}, set=name)
    run_data, _ = columns(collect([run.path], 11))
    evaluations = run_data["evaluations"]
    with_texts = [
        summary["name"]
        for summary, (row_of_prompt,) in zip(
            evaluations["summaries"], evaluations["rows"], strict=True
        )
        if "texts" in row_of_prompt
    ]
    assert with_texts == [
        "batch-000000.easy",
        "batch-000000.hard",
        "batch-000020.easy",
        "batch-000020.hard",
    ]
    assert evaluations["texts"][:2] == ["batch-000000.easy 1: 0.0", "batch-000000.easy 1: 1.0"]


# Untrusted text


def hostile_run(root: Path):
    run = make_run(root, "a<b>&'\"<script>", task={"system_prompt": HOSTILE.replace("\x00", "")})
    run.record(metrics(1))
    run.record_event("warning", 1, text=HOSTILE)
    rows = group(
        1, [1.0, 0.0, None], prompt_text=HOSTILE, answer=json.dumps(HOSTILE), reason=HOSTILE
    )
    rows += [row(HOSTILE, 0.5, prompt_id=9)]
    run.record_rollouts(1, rows)
    record = {
        "prompt_id": 1,
        "prompt": HOSTILE,
        "answer": HOSTILE,
        "samples": 1,
        "scored": 1,
        "correct": 0,
    }
    run.record_evaluation(
        "before", {"step": 0}, [record | {"completions": [HOSTILE], "rewards": [0.0]}]
    )
    return run


def test_text_of_a_run_is_escaped_in_the_page(tmp_path):
    page = view([hostile_run(tmp_path).path], tmp_path / "page.html").read_bytes().decode("utf-8")
    assert "planted" not in page
    assert page.count("<script") == page.count("</script>") == 3
    assert page.count("</title>") == page.count("</style>") == 1
    assert "a&lt;b&gt;&amp;&#x27;&quot;&lt;script&gt; · lagrpo view</title>" in page
    assert re.search("default-src 'none'; script-src 'sha256-.*connect-src 'none'", page)
    (data,) = re.findall(r'id="data">([^<]*)<', page)
    run_data, _ = columns(base64.b64decode(data))
    assert run_data["rollouts"]["texts"][-1] == run_data["events"][0]["text"] == HOSTILE
    assert run_data["rollouts"]["prompts"][0][1:] == [HOSTILE, HOSTILE]


# Runs that are not whole


def test_status_of_a_run_that_goes_on_was_killed_or_resumed(tmp_path):
    run = fill(make_run(tmp_path))
    with locked(run.path):
        assert columns(collect([run.path], 1))[0]["status"][0] == "running"
        holder = json.loads((run.path / ".lock-holder.json").read_text(encoding="utf-8"))
        for change, status in (({"pid": 2**22 + 1}, "killed"), ({"host": "elsewhere"}, "unknown")):
            (run.path / ".lock-holder.json").write_text(
                json.dumps(holder | change), encoding="utf-8"
            )
            assert columns(collect([run.path], 1))[0]["status"][0] == status
    assert columns(collect([run.path], 1))[0]["status"][0] == "finished"
    run.record_event("resumed", 4, changed={}, moved={})
    assert columns(collect([run.path], 1))[0]["status"][0] == "unknown"


# The command and the server


def test_command_writes_a_page_and_says_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", (opened_pages := []).append)
    one, two = fill(make_run(tmp_path, "one")), fill(make_run(tmp_path, "two"))
    code, out, err = command("view", one.path / ".." / "one", one.path, "--open")
    assert (code, err) == (0, "")
    assert out.startswith(f"{one.path}/view.html (")
    assert opened_pages == [(one.path / "view.html").as_uri()]
    assert "<title>one · lagrpo view</title>" in (one.path / "view.html").read_text(
        encoding="utf-8"
    )
    assert command("view", one.path, two.path)[0] == 0
    assert "<title>one, two · lagrpo view</title>" in (tmp_path / "view.html").read_text(
        encoding="utf-8"
    )
    assert (
        command("view", one.path, "--out", tmp_path / "deep" / "x.html", "--completions", 0)[0] == 0
    )
    assert (tmp_path / "deep" / "x.html").is_file()


@pytest.mark.parametrize(
    ("words", "option"),
    [
        pytest.param(["--text", "--out", "page.html"], "--out", id="out with text"),
        pytest.param(["--batch", 2], "--batch", id="batch without text"),
    ],
)
def test_option_without_effect_is_rejected(tmp_path, words, option):
    code, out, err = command("view", fill(make_run(tmp_path)).path, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"lagrpo: {option} ")
    assert err.count("\n") == 1


OUTS = {"directory": "there", "below a file": "file/x.html", "long name": f"{'a' * 300}.html"}


@pytest.mark.parametrize("out", OUTS.values(), ids=OUTS)
def test_page_that_cannot_be_written_is_named_in_one_line(tmp_path, out):
    run = fill(make_run(tmp_path, "one"))
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    code, _, err = command("view", run.path, "--out", tmp_path / out)
    assert (code, err.count("\n")) == (2, 1)
    assert str(tmp_path / out.partition("/")[0]) in err


def test_command_ends_quietly_if_the_reader_of_its_text_has_gone(tmp_path):
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    run = fill(make_run(tmp_path))
    with redirect_stdout(ClosedPipe()), redirect_stderr(io.StringIO()):
        main(["view", str(run.path), "--text"])


def test_missing_answer_is_not_shown(tmp_path):
    run = make_run(tmp_path)
    run.record_rollouts(1, group(1, [0.0, 1.0], answer="null"))
    code, out, _ = command("view", run.path, "--text")
    assert (code, "answer:" in out) == (0, False)
    prompts = columns(collect([run.path], 10))[0]["rollouts"]["prompts"]
    assert [answer for _, _, answer in prompts] == [""]


def test_title_of_the_page_of_the_working_directory_is_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(fill(make_run(tmp_path, "one")).path)
    assert command("view", ".")[0] == 0
    assert "<title>one · lagrpo view</title>" in Path("view.html").read_text(encoding="utf-8")


@pytest.fixture
def served(tmp_path):
    run = fill(make_run(tmp_path))
    server = Server([run.path], lambda: collect([run.path], 100))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield run, server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(
    server: Server, path: str, host: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Asks with the token of the server, unless the path has one."""
    if "token=" not in path:
        path += f"{'&' if '?' in path else '?'}token={server.token}"
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    if host:
        headers["Host"] = host
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    response = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return response


def test_server_answers_with_the_page_and_with_newer_data_only(served):
    run, server = served
    status, headers, page = ask(server, "/")
    assert (status, headers["Content-Type"], headers["X-Frame-Options"]) == (
        200,
        "text/html; charset=utf-8",
        "DENY",
    )
    assert b'<main id="page" data-live>' in page
    stamp = unpack(ask(server, "/data")[2])[0]["stamp"]
    assert ask(server, f"/data?stamp={stamp}")[::2] == (204, b"")
    (run.path / "rollouts" / ".step-000009.parquet.12-0123abcd.tmp").write_bytes(b"half")
    assert ask(server, f"/data?stamp={stamp}")[0] == 204
    run.record(metrics(5))
    status, _, packed = ask(server, f"/data?stamp={stamp}")
    assert (status, unpack(packed)[0]["runs"][0]["metrics"]["step"]) == (200, [1, 2, 3, 4, 5])


@pytest.mark.parametrize("is_killed", [False, True], ids=["ended", "killed"])
def test_server_answers_with_newer_data_when_the_process_of_a_run_is_gone(served, is_killed):
    """The event of the end is written while the process still holds the lock."""
    run, server = served
    with locked(run.path):
        header, _ = unpack(ask(server, "/data")[2])
        assert header["runs"][0]["status"][0] == "running"
        assert ask(server, f"/data?stamp={header['stamp']}")[0] == 204
        holder = json.loads((run.path / HOLDER).read_text(encoding="utf-8"))
    if is_killed:
        # No process has so large a number.
        (run.path / HOLDER).write_text(json.dumps(holder | {"pid": 2**22 + 1}), encoding="utf-8")
    status, _, packed = ask(server, f"/data?stamp={header['stamp']}")
    assert status == 200
    expected = "killed" if is_killed else "finished"
    assert unpack(packed)[0]["runs"][0]["status"][0] == expected


HOLDERS = {
    "empty": b"",
    "not JSON": b"{",
    "list": b"[1]",
    "other keys": b'{"x": 1}',
    "other types": b'{"pid": "1", "host": 2, "since": []}',
    "binary": b"\xff\x00",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", HOLDERS.values(), ids=HOLDERS)
def test_damaged_lock_holder_is_ignored(tmp_path, content):
    run = fill(make_run(tmp_path))
    with locked(run.path):
        (run.path / HOLDER).write_bytes(content)
        collect([run.path], 10)
        with pytest.raises(RunLockedError, match="another process is writing"), locked(run.path):
            pass


def test_server_prints_nothing_if_the_browser_has_gone(served, capsys):
    _, server = served
    ours, of_browser = socket.socketpair()
    path = f"/?token={server.token}"
    request = f"GET {path} HTTP/1.1\r\nHost: localhost:{server.server_port}\r\n\r\n"
    of_browser.sendall(request.encode())
    of_browser.close()
    server.process_request_thread(ours, ("127.0.0.1", 0))
    assert capsys.readouterr().err == ""


def test_view_server_rejects_other_host_names_and_paths(served):
    _, server = served
    for host in ("evil.example", "127.0.0.1", f"127.0.0.1.evil.example:{server.server_port}"):
        assert ask(server, "/", host)[0] == 403
    assert ask(server, "/", f"localhost:{server.server_port}")[0] == 200
    for path in ("/config.toml", "/../config.toml", "/data/x", "/%2e%2e/metrics.jsonl"):
        assert ask(server, path)[0] == 404


@pytest.mark.parametrize("path", ["/", "/data", "/data?stamp=0", "/nosuch"])
@pytest.mark.parametrize("token", ["", "wrong", "ä", "%ff"])
def test_view_server_answers_nobody_without_the_token(served, path, token):
    _, server = served
    joint = "&" if "?" in path else "?"
    assert ask(server, f"{path}{joint}token={quote(token, safe='%')}")[0] == 403


def test_url_of_the_view_server_has_its_token(served):
    run, server = served
    with urlopen(server.url) as answer:
        assert run.path.name in answer.read().decode()


@pytest.mark.parametrize(
    ("site", "status"),
    [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)],
)
def test_view_server_rejects_requests_that_other_pages_make(served, site, status):
    _, server = served
    assert ask(server, "/data", **{"Sec-Fetch-Site": site})[0] == status


MALFORMED = {
    "address": b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
    "percent-encoding": b"GET /?token=%zz%ff HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL": b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "method": b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    "header": b"GET / HTTP/1.1\r\nHost: " + 100_000 * b"x" + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + 500 * b"a: b\r\n" + b"\r\n",
    "line": b"GET /" + 100_000 * b"x" + b" HTTP/1.1\r\n\r\n",
    "version": b"GET / HTTP/x.y\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "bytes": bytes(range(128, 256)) + b"\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("request_bytes", MALFORMED.values(), ids=MALFORMED)
def test_view_server_prints_no_traceback_for_a_malformed_request(served, capsys, request_bytes):
    _, server = served
    ours, of_browser = socket.socketpair()
    of_browser.sendall(request_bytes)
    of_browser.shutdown(socket.SHUT_WR)
    server.process_request_thread(ours, ("127.0.0.1", 0))
    answer = of_browser.recv(1 << 20)
    of_browser.close()
    assert capsys.readouterr().err == ""
    assert not answer.startswith(b"HTTP/1.0 2")
    assert b"<main" not in answer


def test_error_of_a_request_is_one_line(served, monkeypatch, capsys):
    _, server = served
    monkeypatch.setattr(server, "collect", lambda: 1 / 0)
    with pytest.raises(http.client.HTTPException):
        ask(server, "/data")
    assert capsys.readouterr().err.splitlines() == [
        "lagrpo: a request failed: ZeroDivisionError: division by zero"
    ]


def test_requests_at_the_same_time_share_one_collection(served):
    run, server = served
    collect_once = server.collect
    collections: list[int] = []

    def collect_slowly() -> bytes:
        collections.append(len(collections))
        all_ask.wait()
        return collect_once()

    server.collect = collect_slowly
    all_ask = threading.Event()
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(server, "/data")[0])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    all_ask.set()
    for thread in threads:
        thread.join()
    assert answers == [200] * 4
    assert len(collections) == 1
    run.record(metrics(5))
    assert ask(server, "/data")[0] == 200
    assert len(collections) == 2
