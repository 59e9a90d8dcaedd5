"""The completions of another policy that experiments/papers/foreign.toml learns from."""

from __future__ import annotations

import gzip
import json

import foreign
import pytest
from running import tiny_settings
from tiny import save_tiny, tiny_policy

from lagrpo import train
from lagrpo.data.offline import OfflineData, read_records
from lagrpo.runs import load_rollouts

pytestmark = pytest.mark.experiments

ROWS = [json.loads(line) for line in gzip.decompress(foreign.TARGET.read_bytes()).splitlines()]


def prompts_of(name: str) -> set[str]:
    lines = (
        (foreign.TARGET.parent / "sums" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    )
    return {json.loads(line)["prompt"] for line in lines}


def test_no_prompt_of_the_test_is_learned_from():
    assert len(prompts_of("train")) == 80
    assert len(prompts_of("test")) == 20
    assert prompts_of("train").isdisjoint(prompts_of("test"))
    assert {row["prompt"] for row in ROWS} <= prompts_of("train")


def test_a_run_is_learned_from_as_it_was_recorded(tmp_path, monkeypatch, capsys):
    run = train(tiny_settings(save_tiny(tmp_path / "model"), tmp_path)).run
    assert run is not None
    monkeypatch.setattr(foreign, "TARGET", tmp_path / "foreign.jsonl.gz")
    monkeypatch.setattr("sys.argv", ["foreign.py", str(run)])
    foreign.main()
    assert "24 completions" in capsys.readouterr().out
    data = OfflineData(read_records(foreign.TARGET), tiny_policy(), 4, 0, reads_logp=True)
    assert data.has_logp
    then = {
        (*row["token_ids"], row["reward"]): row["rollout_logprobs"] for row in load_rollouts(run)
    }
    completions = [
        completion for group in data.batch(1, len(data)) for completion in group.completions
    ]
    assert len(completions) == 24
    for completion in completions:
        assert completion.rollout_logp.tolist() == pytest.approx(
            then[*completion.token_ids.tolist(), completion.reward], abs=1e-5
        )
