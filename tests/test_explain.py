"""What settings mean, in numbers."""

from __future__ import annotations

from typing import Any

import pytest
from each import each
from tiny import save_tiny

from lagrpo.errors import SettingsError
from lagrpo.settings.schema import Settings
from lagrpo.training.checks import check_settings
from lagrpo.training.explain import expected_memory, meaning


class Shape:
    """A model of two layers, 100 hidden units, an MLP of 300, 4 heads of 25 with keys and values in 2, 1,000 tokens."""

    num_hidden_layers, hidden_size, intermediate_size, vocab_size = 2, 100, 300, 1000
    num_attention_heads, num_key_value_heads, head_dim = 4, 2, None


def memory(ranks: int = 1, sharding: str = "zero1", **sections: Any) -> dict[str, int]:
    base = {
        "model": {"dtype": "bfloat16"},
        "rollout": {"num_generations": 4, "max_num_seqs": 8, "max_completion_length": 10, "max_prompt_length": 20},
        "schedule": {"prompts_per_batch": 2},
        "loss": {"beta": 0.0},
        "distributed": {"strategy": sharding},
        "eval": {"at_start": False},
    }
    settings = Settings.model_validate({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})
    return expected_memory(settings, check_settings(settings), Shape, 1_000_000, ranks=ranks)


def test_memory_of_one_process_by_hand():
    """2 x (20 + 4 x 10) = 120 tokens are learned from; 8 x 10 + 8/4 x 20 = 120 are held, of 2 x 2 layers x 2 x 25."""
    found = memory()
    layer, logits = 44 * 100 + 4 * 2 * 300, 2 * 120 * 1000 + (4 + 2) * 1000 * 100
    idle, checkpoint = found.pop("idle"), found.pop("checkpoint")
    assert checkpoint == 12_000_000  # masters and moments; nothing is stale
    assert idle == pytest.approx(0.15 * sum(found.values()), abs=1)
    assert found == {
        "program": 400 * 2**20,
        "weights": 2 * 2_000_000,
        "optimizer": 16_000_000,
        "activations": 120 * 2 * layer + logits,
        "sampler": 120 * (2 * 2 * 2 * 25) * 2,
    }


def test_memory_grows_with_a_reference_staleness_and_float32():
    plain = memory()
    assert memory(loss={"beta": 0.1})["weights"] - plain["weights"] == 2_000_000
    for schedule in ({"sync_every": 2}, {"num_iterations": 2}):
        assert memory(schedule=schedule)["weights"] - plain["weights"] == 2_000_000
    single = memory(model={"dtype": "float32"})
    assert (single["weights"], single["optimizer"]) == (2 * 4_000_000, 12_000_000)
    halved = memory(optimizer={"micro_batch_tokens": 60})["activations"]
    assert halved == plain["activations"] // 2 + 3 * 1000 * 100


def test_memory_of_a_rank_by_hand():
    """P = 1,000,000 in bfloat16 on 4 ranks: optimizer sharded 2P + 2P (α) + 4P + 12P/4, all sharded (2P + 4P + 12P)/4 +
    2P (α) and what is in hand, embedding (100,000) and a layer (450,000)."""
    four, layers = memory(ranks=4), memory(ranks=4, sharding="fsdp2")
    assert (four["weights"], four["optimizer"], four["checkpoint"]) == (4_000_000, 4_000_000 + 3_000_000, 3_000_000)
    assert layers["weights"] == 500_000 + 2_000_000 + 2 * 900_000
    assert layers["optimizer"] == 1_000_000 + 3_000_000
    served = memory(ranks=4, rollout={"engine": "vllm"})
    assert (four["weights"] - served["weights"], served["sampler"]) == (2_000_000, 0)  # α's copy
    assert memory(ranks=4, sharding="fsdp2", eval={"every": 5})["weights"] == layers["weights"] + 2_000_000


@each("sharding", ["zero1", "fsdp2"])
def test_more_ranks_never_take_more_memory_of_each(sharding):
    sizes = [sum(memory(ranks, sharding).values()) for ranks in (2, 3, 8, 64)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("models") / "tiny"))


def explained(model: str, **sections: Any) -> str:
    settings = Settings.model_validate({"model": {"path": model}} | sections)
    return "\n".join(meaning(settings, check_settings(settings)))


@each(
    ("schedule", "said"),
    [
        ({"sync_every": 10}, "new weights every 10 batches; largest possible staleness 9 updates"),
        ({"sync_every": 3, "num_iterations": 2}, "every 3 batches; largest possible staleness 4 updates"),
        ({"sync_every": 10, "batches": 4}, "largest possible staleness 3 updates"),
        ({"batches": 6, "num_iterations": 2}, "6 batches = 12 updates, 768 samples"),
    ],
)
def test_schedule_is_said_in_batches_and_updates(model, schedule, said):
    assert said in explained(model, schedule=schedule)


def test_memory_is_said_of_each_rank(model, monkeypatch):
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert "for each rank: program" in explained(model, distributed={"strategy": "fsdp2"})


def test_unsupported_model_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    with pytest.raises(SettingsError, match="models of type 'gemma2' have soft-capping"):
        explained(str(tmp_path))
