"""The vLLM client against stubs: deadlines, answers that are not usable, what goes over the wire. No vLLM is needed."""

from __future__ import annotations

import base64
import importlib
import json
import math
import os
import pickle
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from running import tiny_settings
from test_sampling import requests_for
from tiny import save_tiny, tiny_policy

from lagrpo.errors import SettingsError
from lagrpo.model.model import Packed
from lagrpo.model.replica import replica
from lagrpo.rollout.parity import ParityCheck, ParityError, check_fresh
from lagrpo.rollout.vllm import connecting, wire
from lagrpo.rollout.vllm.fleet import Fleet
from lagrpo.rollout.vllm.generation import Generated, Generation
from lagrpo.rollout.vllm.process import EXTENSION
from lagrpo.rollout.vllm.sampler import VllmSampler
from lagrpo.rollout.vllm.server import Deadlines, RefusedError, SamplerError, Server, UnreachableError
from lagrpo.rollout.vllm.weights import FILE, CorruptError, Directories, WeightSync, check_file
from lagrpo.rollout.vllm.wire import DirectoryWire, IpcWire, NcclWire, Parcel
from lagrpo.settings.schema import Settings
from lagrpo.training import run as training

SHORT = Deadlines(start=0.5, request=0.5, sync=5.0, control=0.5)


@contextmanager
def stub(answer):
    """An HTTP server; `answer(method, path, body)` gives status and JSON, or None to never answer."""
    gone = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def reply(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            found = answer(self.command, self.path, body)
            if found is None:
                gone.wait(30)
                return
            content = json.dumps(found[1]).encode()
            self.send_response(found[0])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = reply

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        gone.set()
        server.shutdown()
        server.server_close()


def sampler_at(url, policy, root, failures=3):
    generation = Generation(0, 4, policy.tau, sorted(policy.chat.eos_ids), 8, policy.chat.decode)
    fleet = Fleet([Server(url, None, SHORT)], failures)
    weights = WeightSync(fleet, DirectoryWire(), Directories(str(root)), torch.float32)
    return VllmSampler(fleet, generation, weights)


def generous(method, path, body):
    """A server that does everything it is asked, and generates two tokens."""
    if path == "/weight_info":
        return 200, {"weight_version": generous.label}
    if path == "/update_weight_version":
        generous.label = body["new_version"]
    if path == "/inference/v1/generate":
        return 200, {"choices": [choice(n) for n in range(body["sampling_params"]["n"])]}
    return 200, {}


generous.label = "default"


def choice(index=0, logprobs=(-0.5, -0.25), tokens=(7, 1), end="stop", label=None):
    content = [{"token_id": token, "logprob": p} for token, p in zip(tokens, logprobs, strict=True)]
    spans = [{"version": label or generous.label, "start": 0, "end": len(tokens)}]
    return {
        "index": index,
        "token_ids": list(tokens),
        "logprobs": {"content": content},
        "weight_versions": spans,
        "finish_reason": end,
    }


def test_a_server_that_accepts_and_never_answers_trips_the_deadline(tmp_path):
    policy = tiny_policy()

    def silent(method, path, body):
        return None if path == "/inference/v1/generate" else generous(method, path, body)

    with stub(silent) as url:
        sampler = sampler_at(url, policy, tmp_path, failures=1)
        sampler.sync_weights(policy.weights, 0)
        with pytest.raises(SamplerError, match=r"did not answer within 0\.5 s.*one failure more"):
            list(sampler.sample(requests_for(policy, 3), 2))
        with pytest.raises(SamplerError, match=r"one failure more"):
            sampler.sample(requests_for(policy, 1), 2)
        assert sampler.read()["recoveries"] == 2
        sampler.close()


def test_a_server_that_never_answers_at_all_is_no_server(tmp_path):
    with stub(lambda *_: None) as url, pytest.raises(SettingsError, match=r"/health did not answer within 0\.5 s"):
        train_with(url, tmp_path)


def train_with(url, root, **sections):
    vllm = {"urls": [url], "control_deadline": 0.5}
    model = save_tiny(root / "model")
    return training.train(tiny_settings(model, root, sampling={"sampler": "vllm"}, vllm=vllm, **sections))


def test_a_server_without_the_endpoints_is_told_how_to_start(tmp_path):
    def production(method, path, body):
        if path == "/v1/models":
            return 200, {"data": [{"root": "somewhere", "max_model_len": 1000}]}
        return (200, None) if path == "/health" else (404, {"detail": "Not Found"})

    with (
        stub(production) as url,
        pytest.raises(SettingsError, match=r"has no /weight_info: start it with `lagrpo serve"),
    ):
        train_with(url, tmp_path)


@pytest.mark.parametrize(
    ("status", "content", "kind", "message"),
    [
        (401, {"error": "Unauthorized"}, RefusedError, "does not accept the API key; set LAGRPO_VLLM_API_KEY"),
        (400, {"error": {"message": "too long"}}, RefusedError, r"refused \(400\): too long"),
        (500, {"error": {"message": "engine died"}}, UnreachableError, r"failed inside \(500\): engine died"),
        (503, {}, UnreachableError, r"failed inside \(503\)"),
    ],
)
def test_what_a_server_says_no_with(status, content, kind, message):
    with stub(lambda *_: (status, content)) as url, pytest.raises(kind, match=message):
        Server(url, None, SHORT).version()


def test_nobody_there():
    with pytest.raises(UnreachableError, match=r"http://127\.0\.0\.1:9 cannot be reached: .*refused"):
        Server("http://127.0.0.1:9", None, SHORT).version()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Generated([5, 6], [-1.0, math.nan], [("R:0", 0, 2)], "stop"), "no finite log-prob of token 1"),
        (Generated([5, 6], [-1.0, -math.inf], [("R:0", 0, 2)], "stop"), "no finite log-prob of token 1"),
        (Generated([], [], [], "stop"), "'stop' after 0 tokens"),
        (Generated([5], [-1.0], [("R:0", 0, 1)], "error"), "'error' after 1 tokens"),
        (Generated([5, 6], [-1.0, -1.0], [("R:0", 0, 1)], "stop"), "which weights generated every token"),
    ],
)
def test_completions_that_cannot_be_used_have_failed(tmp_path, answer, reason):
    sampler = sampler_at("http://127.0.0.1:9", tiny_policy(), tmp_path)
    sampler.fleet.served.run = "R"
    outcome = sampler.generation.read(answer, sampler.fleet.served).outcome
    assert outcome is not None
    assert outcome.kind == "failed"
    assert reason in outcome.reason
    sampler.close()


def test_a_completion_keeps_its_spans(tmp_path):
    sampler = sampler_at("http://127.0.0.1:9", tiny_policy(), tmp_path)
    sampler.fleet.served.run = "R"
    answer = Generated([5, 6, 1], [-1.0] * 3, [("R:3", 0, 2), ("R:4", 2, 3)], "stop")
    completion = sampler.generation.read(answer, sampler.fleet.served)
    assert completion.outcome is None
    assert completion.versions.tolist() == [3, 3, 4]
    assert completion.finished
    sampler.close()


def test_a_server_that_others_sync_to_is_one_failure_after_the_other(tmp_path):
    policy = tiny_policy()

    def shared(method, path, body):
        return (
            (200, {"choices": [choice(label="other:3")]})
            if path == "/inference/v1/generate"
            else generous(method, path, body)
        )

    with stub(shared) as url:
        sampler = sampler_at(url, policy, tmp_path, failures=2)
        sampler.sync_weights(policy.weights, 0)
        with pytest.raises(SamplerError, match=r"are not of this run \(labeled other:3\).*one failure more"):
            list(sampler.sample(requests_for(policy, 2), 1))
        assert sampler.read()["recoveries"] == 3
        sampler.close()


def test_a_missing_log_prob_is_a_failure_and_none_of_zero(tmp_path):
    """The first of the two completions has a log-prob of -9999, which is how vLLM writes -inf; the second none."""
    policy = tiny_policy()

    def odd(method, path, body):
        if path != "/inference/v1/generate":
            return generous(method, path, body)
        lacking = choice(1) | {"logprobs": {"content": choice(1)["logprobs"]["content"][:1]}}
        return 200, {"choices": [choice(0, logprobs=(-0.5, -9999.0)), lacking]}

    with stub(odd) as url:
        sampler = sampler_at(url, policy, tmp_path)
        sampler.sync_weights(policy.weights, 0)
        ((_, group),) = sampler.sample(requests_for(policy, 1), 2)
        assert [c.outcome.kind for c in group.completions if c.outcome] == ["failed", "failed"]
        assert all(math.isnan(c.logp_alpha[1]) for c in group.completions)
        sampler.close()


def test_seeds_are_those_of_the_address_and_the_salt_is_the_version(tmp_path):
    policy, asked = tiny_policy(), []

    def recording(method, path, body):
        if path == "/inference/v1/generate":
            asked.append(body)
        return generous(method, path, body)

    with stub(recording) as url:
        for _ in range(2):
            sampler = sampler_at(url, policy, tmp_path)
            sampler.sync_weights(policy.weights, 0)
            list(sampler.sample(requests_for(policy, 3), 2))
            sampler.close()
    seeds = [body["sampling_params"]["seed"] for body in asked]
    assert sorted(seeds[:3]) == sorted(seeds[3:])
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert len({body["cache_salt"] for body in asked[:3]}) == 1
    assert asked[0]["cache_salt"] != asked[3]["cache_salt"]
    assert asked[0]["sampling_params"]["stop_token_ids"] == sorted(policy.chat.eos_ids)


def test_a_file_that_is_not_what_was_written_is_refused(tmp_path, monkeypatch):
    directories = Directories(str(tmp_path))
    weights = {"a": torch.arange(6.0), "b": torch.tensor([math.nan, 0.0])}
    path = directories.put(weights, 3)
    check_file(path / FILE, weights)
    with pytest.raises(CorruptError, match=r"a differs"):
        check_file(path / FILE, weights | {"a": -weights["a"]})  # -0.0 is not 0.0, bit for bit
    with pytest.raises(CorruptError, match=r"other parameters"):
        check_file(path / FILE, {"a": weights["a"]})
    (path / FILE).write_bytes((path / FILE).read_bytes()[:-4])
    with pytest.raises(CorruptError, match=r"was not written as it should be"):
        check_file(path / FILE, weights)
    directories.put(weights, 4)
    directories.drop_before(4)
    assert [entry.name for entry in directories.root.iterdir()] == ["v000004"]
    directories.close()
    assert not list(tmp_path.iterdir())


def test_counts_among_the_weights_keep_their_type(tmp_path):
    sampler = sampler_at("http://127.0.0.1:9", tiny_policy(), tmp_path)
    sampler.weights.dtype = torch.bfloat16
    packed = sampler.weights.pack({"weight": torch.ones(2), "count": torch.tensor(2**20 + 1)}, 1).weights
    assert (packed["weight"].dtype, packed["count"].item()) == (torch.bfloat16, 2**20 + 1)
    sampler.close()


def transfers(url_answers):
    """The calls that a wire makes, with their bodies."""
    calls = []

    def answer(method, path, body):
        calls.append((path, body))
        return url_answers(path)

    return calls, answer


def parcel():
    weights = {"x": torch.ones(2, 3, dtype=torch.bfloat16), "y": torch.zeros(4, dtype=torch.bfloat16)}
    return Parcel("run:7", weights, lambda: pytest.fail("nothing is written for this wire"))


def test_nccl_tells_the_servers_names_in_the_order_of_the_broadcast(monkeypatch):
    from stuck_nccl import fake_streams

    calls, answer = transfers(lambda path: (200, {"world_size": 2} if path == "/get_world_size" else {}))
    sent = []
    for name, fake in {
        "unique_id": lambda: b"i" * 128,
        "init_rank": lambda world, identity, rank: (world, identity, rank),
        "all_reduce": lambda tensors, comms: sent.append("greeting"),
        "broadcast": lambda tensors, root, comms: sent.append((tensors[0].shape, root, comms)),
    }.items():
        monkeypatch.setattr(wire.nccl, name, fake)
    fake_streams(monkeypatch.setattr)
    monkeypatch.setattr(wire, "greeting", lambda: torch.zeros(1))
    own, communicator = parcel(), (5, b"i" * 128, 0)
    with stub(answer) as one, stub(answer) as other:
        servers = [Server(url, None, SHORT) for url in (one, other)]
        link = NcclWire()
        assert link.send(servers, own) == [None, None]
        assert link.send(servers, own) == [None, None]
    met = [body["init_info"] for path, body in calls if path == "/init_weight_transfer_engine"]
    assert sorted(info["rank_offset"] for info in met) == [1, 3]
    assert {info["world_size"] for info in met} == {5}
    assert {base64.b64decode(info["nccl_unique_id_b64"]) for info in met} == {b"i" * 128}
    each = [(torch.Size([2, 3]), 0, [communicator]), (torch.Size([4]), 0, [communicator])]
    assert sent == ["greeting", *each, *each]
    (update, *_) = [body["update_info"] for path, body in calls if path == "/update_weights"]
    assert update == {"names": ["x", "y"], "dtype_names": ["bfloat16"] * 2, "shapes": [[2, 3], [4]]}
    order = [path for path, _ in calls if path in ("/start_weight_update", "/finish_weight_update")]
    assert order.count("/start_weight_update") == order.count("/finish_weight_update") == 4
    assert {body["weight_version"] for path, body in calls if path == "/finish_weight_update"} == {"run:7"}


@pytest.mark.parametrize("call", ["init_rank", "all_reduce", "broadcast", "synchronize"])
def test_a_call_of_nccl_that_never_returns_ends_the_process_and_leaves_the_servers_paused(call, tmp_path, monkeypatch):
    from stuck_nccl import sync_weights

    paths: list[str] = []
    phase = "the update" if call == "broadcast" else "the meeting"  # which waits for its first sum
    with pytest.raises(SamplerError) as raised:
        sync_weights(call, tmp_path, paths, patch=monkeypatch.setattr)
    said = str(raised.value)
    assert said.startswith(f"version 3 did not get to the servers: {phase} by NCCL did not end within 1 s")
    assert "They are left paused" in said
    assert "vllm.sync_deadline" in said
    assert "/pause?mode=keep" in paths
    assert "/resume" not in paths


def test_a_server_that_refuses_to_meet_ends_the_wait_at_once(tmp_path, monkeypatch):
    import stuck_nccl

    monkeypatch.setattr(stuck_nccl, "DEADLINES", Deadlines(start=1, request=1, sync=600, control=5))
    with pytest.raises(SamplerError, match=r"the meeting by NCCL cannot end: .*refused \(400\): no such backend"):
        stuck_nccl.sync_weights("init_rank", tmp_path, [], refusing=True, patch=monkeypatch.setattr)


@pytest.mark.parametrize("call", ["init_rank", "broadcast"])
def test_the_process_of_a_trainer_whose_nccl_is_stuck_ends_with_what_was_wrong(call, tmp_path):
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "stuck_nccl.py"), call, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent / 'src'}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "SamplerError: version 3 did not get to the servers" in done.stderr


def test_ipc_hands_over_handles(monkeypatch):
    calls, answer = transfers(lambda path: (200, {}))
    monkeypatch.setattr(IpcWire, "gpu", staticmethod(lambda: "GPU-1"))
    monkeypatch.setattr(IpcWire, "handle", staticmethod(lambda tensor: ("handle", tuple(tensor.shape))))
    with stub(answer) as url:
        assert IpcWire().send([Server(url, None, SHORT)], parcel()) == [None]
    assert [path for path, _ in calls] == [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    ]
    handles = pickle.loads(base64.b64decode(calls[2][1]["update_info"]["ipc_handles_pickled"]))
    assert handles == [{"GPU-1": ("handle", (2, 3))}, {"GPU-1": ("handle", (4,))}]


def test_a_transfer_that_fails_is_a_failure_of_that_server_alone(monkeypatch):
    monkeypatch.setattr(IpcWire, "describe", lambda self, parcel: {})
    calls, bad = transfers(lambda path: (500, {"error": "no"}) if path == "/update_weights" else (200, {}))
    with stub(bad) as one, stub(lambda *_: (200, {})) as other:
        failures = IpcWire().send([Server(url, None, SHORT) for url in (one, other)], parcel())
    assert isinstance(failures[0], UnreachableError)
    assert failures[1] is None
    assert "/finish_weight_update" not in [path for path, _ in calls]


NOISE = torch.tensor([0.03, -0.02, 0.04, -0.03]).repeat(8)
OLD = torch.linspace(-3, -0.1, 32)


def test_a_stale_server_is_told_by_its_scores_alone():
    """The policy moved by .2 a token, seven times the noise: all 32 tokens tell, and 2^-32 is no chance."""
    new = OLD + 0.2
    assert check_fresh(OLD, new, OLD + NOISE, new - NOISE, "v") == 32
    with pytest.raises(ParityError, match=r"stale weights: of the 32 tokens that tell old from new, 32 are nearer"):
        check_fresh(OLD, new, OLD + NOISE, OLD - NOISE, "v")


def test_what_the_noise_hides_is_not_decided():
    """A move of .001 a token cannot be told from noise of .03: nearer to the old by chance is no error."""
    new = OLD + 0.001
    assert check_fresh(OLD, new, OLD + NOISE, OLD - NOISE, "v") == 0


def test_a_few_wild_tokens_decide_nothing():
    """Three tokens that became unlikely are scored far off, toward the old: by squares the old would be nearer."""
    new, now = OLD + 0.2, OLD + 0.2 - NOISE
    now[:3] = new[:3] - 1.5
    assert float((now - OLD).square().sum()) < float((now - new).square().sum())
    assert check_fresh(OLD, new, OLD + NOISE, now, "v") == 32


def test_nineteen_tokens_are_too_few_to_say():
    old, new = OLD[:19], OLD[:19] + 0.2
    assert check_fresh(old, new, old + NOISE[:19], old - NOISE[:19], "v") == 19


def test_scores_that_did_not_change_at_all_are_stale_whatever_the_noise():
    with pytest.raises(ParityError, match=r"did not change at all with the weight sync"):
        check_fresh(OLD, OLD + 1e-6, OLD + NOISE, OLD + NOISE, "v")
    assert check_fresh(OLD, OLD, OLD + NOISE, OLD + NOISE, "v") == 0.0  # nor did the policy


class Echo:
    """A sampler whose server computes as the learner does, shifted by `shift` nats, at the temperature `tau`."""

    def __init__(self, policy, shift=0.0, tau=None):
        self.policy, self.shift, self.tau = policy, shift, tau or policy.tau
        self.servers, self.version = ["the server"], policy.version

    def describe_versions(self):
        return f"the server: {self.version}"

    def generate_on_server(self, number, requests, G, max_tokens):
        from lagrpo.rollout.local import LocalSampler

        return LocalSampler(replica(self.policy), 0, max_tokens, 8, tau=self.tau).generate_on_server(
            0, requests, G, max_tokens
        )

    def scores(self, items):
        packed = Packed.build([(ids, [torch.tensor(tokens)]) for ids, tokens in items])
        with torch.no_grad():
            logp = (self.policy.model(packed, tau=1.0) + self.shift).tolist()
        return [[[logp.pop(0) for _ in tokens] for _, tokens in items]]


def test_the_parity_check_passes_what_agrees_and_says_by_how_much():
    policy = tiny_policy(tau=0.7)
    metrics = ParityCheck(requests_for(policy, 3), torch.bfloat16)(policy, Echo(policy, shift=0.05))
    assert metrics["parity_mean"] == pytest.approx(0.05, abs=1e-5)
    assert metrics["parity_kl"] == pytest.approx(math.expm1(-0.05) + 0.05, abs=1e-5)
    assert policy.tau == 0.7


def test_the_compared_tokens_are_renewed_when_the_policy_has_moved_away_from_them():
    """Batch 0's completions have one address: what is generated again differs because the policy does."""
    policy = tiny_policy()
    check = ParityCheck(requests_for(policy, 3), torch.float32)
    check(policy, Echo(policy))
    first = check._items
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))
    check(policy, Echo(policy))
    assert check._items is first
    with torch.no_grad():
        policy.model.head.weight.copy_(-policy.model.head.weight)
    check(policy, Echo(policy))
    assert check._items is not first
    assert check._items != first


def test_the_parity_check_refuses_other_weights_and_log_probs_of_another_temperature():
    policy = tiny_policy(tau=0.7)
    check = ParityCheck(requests_for(policy, 3), torch.bfloat16)
    with pytest.raises(ParityError, match=r"more than the tolerance of 0.1"):
        check(policy, Echo(policy, shift=0.11))
    with pytest.raises(ParityError, match=r"another temperature"):
        ParityCheck(requests_for(policy, 3), torch.float32)(policy, Echo(policy, tau=1.0))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"vllm": {"urls": ["localhost:8000"]}, "sampling": {"sampler": "vllm"}}, "is no URL"),
        ({"vllm": {"urls": ["http://a", "http://a"]}, "sampling": {"sampler": "vllm"}}, "there twice"),
        ({"vllm": {"urls": ["http://a"], "servers": 2}, "sampling": {"sampler": "vllm"}}, "set one of them"),
        ({"vllm": {"servers": 2}}, "sampling.sampler is 'local'"),
        ({"sampling": {"sampler": "vllm", "temperature": 2.5}}, "vLLM takes at most 2"),
    ],
)
def test_settings_that_contradict_themselves(sections, message):
    with pytest.raises(ValueError, match=message):
        Settings.model_validate(sections)


def test_a_python_without_vllm_is_named_before_anything_is_loaded(tmp_path, monkeypatch):
    import sys

    monkeypatch.setattr(training.Parts, "_build", lambda *_: pytest.fail("a model was loaded"))
    model = save_tiny(tmp_path / "model")
    for python, message in ((sys.executable, "has no vllm"), (str(tmp_path / "none"), "no such Python")):
        settings = tiny_settings(model, tmp_path, sampling={"sampler": "vllm"}, vllm={"python": python})
        with pytest.raises(SettingsError, match=message):
            training.train(settings)


@pytest.mark.parametrize(
    ("vllm", "message"),
    [
        ({"options": ["--port 9000"]}, r"^vllm: options: '--port' is set by lagrpo itself"),
        ({"options": ["--dtype=float16", "--x"]}, r"^vllm: options: '--dtype' is set by lagrpo itself"),
        ({"directory": "/proc/none"}, r"^vllm: directory = '/proc/none' is no directory, and cannot be made"),
        ({"weight_sync": "nccl"}, r"^vllm: weight_sync = 'nccl' sends weights from the memory of a GPU"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_is(tmp_path, monkeypatch, vllm, message):
    monkeypatch.setattr(training.Parts, "_build", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr(connecting, "StartedServer", lambda *_: pytest.fail("a server was started"))
    monkeypatch.setattr(connecting, "check_python", lambda python: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = tiny_settings(save_tiny(tmp_path / "model"), tmp_path, sampling={"sampler": "vllm"}, vllm=vllm)
    with pytest.raises(SettingsError, match=message):
        training.train(settings)


def test_a_head_that_multiplies_by_older_weights_is_refused(monkeypatch):
    """What our worker extension asks of a server's head after a weight sync."""
    monkeypatch.syspath_prepend(str(EXTENSION))
    check_head = importlib.import_module("lagrpo_extension").check_head
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = weight.clone()
    head = SimpleNamespace(weight=weight, cpu_linear=lambda x, weight, bias: torch.nn.functional.linear(x, packed))
    check_head(head)
    weight.view(torch.int16)[:, ::8] += 1  # the least that a bfloat16 weight can change
    with pytest.raises(RuntimeError, match=r"packed copy of lm_head was not renewed"):
        check_head(head)
    packed.copy_(weight)
    check_head(head)
