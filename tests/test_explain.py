"""What settings mean, in numbers."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import save_tiny

from lagrpo.errors import SettingsError
from lagrpo.settings.schema import Settings
from lagrpo.training import explain as meaning
from lagrpo.training.checks import check_settings
from lagrpo.training.explain import activation_bytes, expected_memory


class Shape:
    """A model of two layers, 100 hidden units, an MLP of 300, 4 heads of 25 with keys and values in 2, 1,000 tokens."""

    num_hidden_layers, hidden_size, intermediate_size, vocab_size = 2, 100, 300, 1000
    num_attention_heads, num_key_value_heads, head_dim = 4, 2, None


def memory(fused: bool = False, ranks: int = 1, sharding: str = "zero1", **sections: Any) -> dict[str, int]:
    base = {
        "model": {"dtype": "bfloat16"},
        "rollout": {"num_generations": 4, "max_num_seqs": 8, "max_completion_length": 10, "max_prompt_length": 20},
        "schedule": {"prompts_per_batch": 2},
        "distributed": {"strategy": sharding},
    }
    settings = Settings.model_validate({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})
    return expected_memory(settings, check_settings(settings), Shape, 1_000_000, fused, ranks=ranks)


def test_the_memory_by_hand():
    """2 x (20 + 4 x 10) = 120 tokens are learned from; 8 x 10 + 8/4 x 20 = 120 are held, of 2 x 2 layers x 2 x 25."""
    beside = memory(eval={"at_start": False}, loss={"beta": 0.0})
    layer, logits = 44 * 100 + 4 * 2 * 300, 2 * 120 * 1000 + (4 + 2) * 1000 * 100
    idle, checkpoint = beside.pop("idle"), beside.pop("checkpoint")
    assert checkpoint == 12_000_000  # masters and moments; nothing lags
    assert idle == pytest.approx(0.15 * sum(beside.values()), abs=1)
    assert beside == {
        "program": 400 * 2**20,
        "weights": 2 * 2_000_000,
        "optimizer": 16_000_000,
        "activations": 120 * 2 * layer + logits,
        "sampler": 120 * (2 * 2 * 2 * 25) * 2,
    }


def test_what_changes_the_memory():
    base: dict[str, Any] = {"eval": {"at_start": False}}
    plain, reference = memory(**base, loss={"beta": 0.0}), memory(**base, loss={"beta": 0.1})
    assert reference["weights"] - plain["weights"] == 2_000_000
    for schedule, copies in (
        ({"sync_every": 1}, 2),
        ({"sync_every": 2}, 3),
        ({"num_iterations": 2}, 3),
        ({"kind": "lagged", "sync_every": 1}, 3),
    ):
        lagging = memory(**base, fused=True, schedule=schedule, loss={"beta": 0.0})
        assert lagging["weights"] == copies * 2_000_000
    single = memory(**base, model={"dtype": "float32"})
    assert (single["weights"], single["optimizer"]) == (3 * 4_000_000, 12_000_000)
    assert (
        memory(**base, optimizer={"micro_batch_tokens": 60})["activations"]
        == plain["activations"] // 2 + 3 * 1000 * 100
    )
    settings = Settings.model_validate({"optimizer": {"gradient_checkpointing": True}})
    assert activation_bytes(settings, Shape, 2) == 2 * 100 * 2 + 2 * (44 * 100 + 4 * 2 * 300)


def test_the_memory_of_a_rank():
    """P = 1,000,000 in bfloat16 on 4 ranks: optimizer sharded 2P + 2P (α) + 4P + 12P/4, all sharded (2P + 4P + 12P)/4 +
    2P (α) and what is in hand, embedding (100,000) and a layer (450,000)."""
    base: dict[str, Any] = {"eval": {"at_start": False}, "loss": {"beta": 0.0}}
    four = memory(**base, ranks=4)
    assert (four["weights"], four["optimizer"], four["checkpoint"]) == (4_000_000, 4_000_000 + 3_000_000, 3_000_000)
    layers = memory(**base, ranks=4, sharding="fsdp2")
    assert layers["weights"] == 500_000 + 2_000_000 + 2 * 900_000
    assert layers["optimizer"] == 1_000_000 + 3_000_000
    assert layers["activations"] == four["activations"]
    evaluated = memory(**{**base, "eval": {"every": 5}}, ranks=4, sharding="fsdp2")
    assert evaluated["weights"] == layers["weights"] + 2_000_000
    served = memory(**base, ranks=4, rollout={"engine": "vllm"})
    assert four["weights"] - served["weights"] == 2_000_000  # alpha's copy
    assert served["sampler"] == 0
    assert four["sampler"] == (4 * 10 + 20) * (2 * 2 * 2 * 25) * 2  # one prompt of two
    longer: dict[str, Any] = {"every": 5, "num_samples": 4, "num_prompts": 1}
    longer["sets"] = [{"name": "long", "max_completion_length": 70}]
    assert memory(**{**base, "eval": longer}, ranks=4)["sampler"] == (4 * 70 + 20) * (2 * 2 * 2 * 25) * 2
    by_server = {"rollout": {"engine": "vllm"}, "eval": {"every": 5}}
    assert memory(**{**base, **by_server}, ranks=4, sharding="fsdp2")["weights"] == layers["weights"] - 2_000_000
    assert [memory(**{**base, **by_server}, ranks=ranks)["sampler"] for ranks in (1, 4)] == [0, 0]
    single = memory(**base, ranks=4, model={"dtype": "float32"})
    assert (single["weights"], single["optimizer"]) == (8_000_000, 7_000_000)
    for sharding in ("zero1", "fsdp2"):
        assert memory(**base, ranks=1, sharding=sharding) == memory(**base)


@pytest.mark.parametrize("sharding", ["zero1", "fsdp2"])
def test_more_ranks_never_take_more_memory_of_each(sharding):
    sizes = [sum(memory(ranks=ranks, sharding=sharding).values()) for ranks in (2, 3, 4, 8, 64)]
    assert sizes == sorted(sizes, reverse=True)


def test_nccl_from_sharded_layers_is_rejected_and_the_memory_is_of_a_rank(model, monkeypatch):
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    sharded = {"model": {"path": model}, "rollout": {"engine": "vllm"}, "distributed": {"strategy": "fsdp2"}}
    settings = Settings.model_validate(sharded)
    assert "for each rank: program" in "\n".join(meaning.meaning(settings, check_settings(settings)))
    with pytest.raises(SettingsError, match=r"vllm.weight_transfer = 'nccl' sends from one GPU"):
        check_settings(Settings.model_validate(sharded | {"vllm": {"weight_transfer": "nccl"}}))


def test_what_layers_of_the_kernels_leave():
    """In each of two layers the stream twice, queries and what they attended to, keys and values, gate and up."""
    assert activation_bytes(Settings(), Shape, 2, fused=True) == 2 * 2 * (2 * 100 + 2 * 100 + 2 * 50 + 2 * 300)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("models") / "tiny"))


def test_schedule_in_words(model):
    for schedule, said in (
        ({"sync_every": 10}, "every(10): new weights every 10 batches, 10 updates per weight sync"),
        ({"sync_every": 3, "num_iterations": 2}, "every 3 batches, 6 updates per weight sync; largest possible lag 4"),
        (
            {"kind": "lagged", "sync_every": 2, "num_iterations": 3},
            "lagged(2): new weights before every batch, 3 updates per weight sync; largest possible lag 6 updates",
        ),
        ({"sync_every": 10, "batches": 4}, "10 updates per weight sync; largest possible lag 3 updates"),
        ({"stages": 2, "batches": 3, "num_iterations": 2}, "2 stages x 3 batches = 12 updates, 768 samples"),
    ):
        settings = Settings.model_validate({"model": {"path": model}, "schedule": schedule})
        assert said in "\n".join(meaning.meaning(settings, check_settings(settings)))


def test_what_is_explained_is_refused_where_it_cannot_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    settings = Settings.model_validate({"model": {"path": str(tmp_path)}})
    with pytest.raises(SettingsError, match="models of type 'gemma2' have soft-capping"):
        meaning.meaning(settings, check_settings(settings))
