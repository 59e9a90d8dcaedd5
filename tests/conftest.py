"""Settings of all tests: a time limit, signals as in a terminal, and a list of deselected tests."""

import logging
import os
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import tiny
import torch
from ranks import run_on_ranks
from running import note_processes, skip_curves_and_syncs

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which transformers does.
    os.environ["TRITON_INTERPRET"] = "1"

hypothesis.settings.register_profile(
    "lagrpo", deadline=None
)  # a busy machine is no failure; tests have a time limit
hypothesis.settings.load_profile("lagrpo")

NEEDS = {
    "gpu": "a GPU (make test-gpu)",
    "vllm": "vLLM (make test-vllm)",
    "peer": "another program (make check-trl)",
    "browser": "Chromium (make test-view)",
    "trackers": "wandb and trackio (make test-trackers)",
    "gym": "reasoning-gym (make test-gym)",
    "older": "transformers 4.57.3 (make check-older)",
}
REASONS = {name: f"they need {need}" for name, need in NEEDS.items()} | {
    "experiments": "they are about experiments and benchmarks (make test-experiments)",
    "triton": "they run Triton's interpreter (make test-triton)",
}
SECONDS_WITH_SERVERS = 900  # for these: they start servers, download or compile

_deselected: defaultdict[str, set[str]] = defaultdict(set)


def pytest_configure() -> None:
    """A shell starts what stands before `&` with SIGINT ignored. Tests of Ctrl-C must not depend on
    that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of experiments import much, so nothing imports them unless their tests are selected."""
    if collection_path.suffix != ".py" or "not experiments" not in config.option.markexpr:
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if "pytestmark = pytest.mark.experiments" in text else None


def pytest_collection_finish() -> None:
    """pytest attaches its handlers to every logger that does not propagate, six times a test.
    PyTorch has forty of them: a third of the time of a small test."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in NEEDS) and not item.get_closest_marker(
            "timeout"
        ):
            item.add_marker(pytest.mark.timeout(SECONDS_WITH_SERVERS))


def pytest_make_parametrize_id(val: object) -> str | None:
    """The id of a dtype, such as bfloat16. None leaves other values to pytest."""
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    return None


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        for name in REASONS:
            if item.get_closest_marker(name):
                _deselected[name].add(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With several test processes each of them collects, and tells the one that reports."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["deselected"] = {name: sorted(tests) for name, tests in _deselected.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for name, tests in getattr(node, "workeroutput", {}).get("deselected", {}).items():
        _deselected[name].update(tests)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.get_verbosity() < 0:
        return
    for name, tests in _deselected.items():
        terminalreporter.section(f"deselected, because {REASONS[name]}")
        terminalreporter.write_line("\n".join(f"  {test}" for test in sorted(tests)))


@pytest.fixture(autouse=True, scope="session")
def quick_runs() -> None:
    skip_curves_and_syncs()


@pytest.fixture(autouse=True)
def processes_of_other_tests_are_known() -> None:
    note_processes()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model, which tests leave as it is."""
    return tiny.save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def ranks() -> Iterator[Any]:
    """`ranks.run(function, *given, size=3)`: see ranks.py. They compute with one thread, and what
    they are compared with, in this process, does too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SimpleNamespace(run=run_on_ranks)
    torch.set_num_threads(threads)


@pytest.fixture(params=["c", "torch"])
def either_computation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs twice: its tiny policies compute with lagrpo's kernels, and with PyTorch's
    operations in their place."""
    monkeypatch.setattr(tiny, "BACKEND", request.param)
    return request.param


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are loaded, without fail, and tiny policies compute with them."""
    from lagrpo.cpu import library, panels

    assert library.why_not() is None
    panels.chosen_products()
    monkeypatch.setattr(tiny, "BACKEND", "c")
