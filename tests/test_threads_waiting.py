"""How OpenMP's threads wait: said before PyTorch is there, unless the user said it."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys

import pytest

from lagrpo.sampling.vllm.process import Launch
from lagrpo.threads import waiting

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP is Linux's")
CLEAN = {name: value for name, value in os.environ.items() if name not in waiting.POLICIES}


def printed(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=CLEAN | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@linux
def test_a_short_spin_is_put_into_an_environment_that_says_nothing():
    environment = {"OMP_NUM_THREADS": "2"}
    assert waiting.choose(environment, {}) == {"GOMP_SPINCOUNT": waiting.SPINS}
    assert environment == {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": waiting.SPINS}


@pytest.mark.parametrize("users", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": ""}])
def test_what_the_user_decided_stays(users):
    environment = dict(users)
    assert waiting.choose(environment, {}) == {}
    assert environment == users


def test_nothing_is_put_there_once_pytorch_is_loaded():
    environment: dict[str, str] = {}
    assert waiting.choose(environment, {"sys", "torch"}) == {}
    assert environment == {}


@linux
@pytest.mark.parametrize(
    ("code", "users", "seen"),
    [
        ("import lagrpo", {}, waiting.SPINS),
        ("import lagrpo", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("import lagrpo", {"OMP_WAIT_POLICY": "passive"}, "None"),
        ("import torch, lagrpo", {}, "None"),
    ],
)
def test_importing_the_package_does_it(code, users, seen):
    assert printed(f"{code}\nimport os; print(os.environ.get('GOMP_SPINCOUNT'))", **users) == seen


@linux
def test_openmp_reads_it_when_pytorch_is_loaded():
    """GNU's OpenMP prints its settings as it loads."""
    done = subprocess.run(
        [sys.executable, "-c", "import lagrpo, torch"],
        env=CLEAN | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("PyTorch's OpenMP here is not GNU's")
    assert f"GOMP_SPINCOUNT = '{waiting.SPINS}'" in done.stderr


@linux
@pytest.mark.parametrize(("users", "seen"), [({}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_a_program_with_an_openmp_of_its_own_gets_the_users_choice_alone(users, seen):
    code = (
        "import lagrpo, os\n"
        "from lagrpo.threads.waiting import drop_own\n"
        "given = drop_own(os.environ)\n"
        "print(given.get('GOMP_SPINCOUNT'), given['PATH'] == os.environ['PATH'])"
    )
    assert printed(code, **users) == f"{seen} True"


@linux
def test_a_vllm_server_gets_the_users_choice_alone(monkeypatch):
    launch = Launch(python="python", model="m", dtype="bfloat16", longest=8, max_num_seqs=1)
    monkeypatch.setattr(waiting, "_own", {"GOMP_SPINCOUNT": waiting.SPINS})
    monkeypatch.setenv("GOMP_SPINCOUNT", waiting.SPINS)
    assert "GOMP_SPINCOUNT" not in launch.environment("key")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert launch.environment("key")["GOMP_SPINCOUNT"] == "7"


@pytest.mark.parametrize(("users", "seen"), [({}, "false"), ({"TOKENIZERS_PARALLELISM": "true"}, "true")])
def test_tokenizers_start_no_threads_of_their_own_unless_the_user_says_so(monkeypatch, users, seen):
    monkeypatch.setattr(waiting, "_own", {})
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")  # so that it is put back afterward
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    waiting.quiet_tokenizers()
    assert os.environ["TOKENIZERS_PARALLELISM"] == seen
    assert ("TOKENIZERS_PARALLELISM" in waiting.drop_own(os.environ)) == bool(users)


def test_the_examples_in_the_docstrings_hold():
    results = doctest.testmod(waiting)
    assert (results.attempted > 0, results.failed) == (True, 0)
