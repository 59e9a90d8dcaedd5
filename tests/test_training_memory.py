"""The memory that a dry run says: by hand, and beside peaks that were measured."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lagrpo.errors import SettingsError
from lagrpo.settings.schema import Settings
from lagrpo.startup import memory
from lagrpo.startup.checks import check_settings
from lagrpo.startup.memory import (
    ERROR,
    KEYS_AND_VALUES,
    Computation,
    ModelSizes,
    Teacher,
    Term,
    expected_memory,
    largest_micro_batch,
    largest_term,
    peak,
)
from lagrpo.startup.memory_words import check_memory, memory_table, memory_warning

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

# P = 1,000,000: 100 x 1,000 in the embedding, which is the head, 900,000 in two layers.
MILLION = ModelSizes(
    parameters=1_000_000,
    vocabulary=1000,
    hidden=100,
    mlp=1000,
    layers=2,
    heads=10,
    kv_heads=5,
    head_dim=10,
)
# The shapes of bench_gpu.py.
GPU_MODELS = {
    "135m": ModelSizes(134_543_808, 49_152, 576, 1536, 30, 9, 3, 64),
    "0.5b": ModelSizes(494_032_768, 151_936, 896, 4864, 24, 14, 2, 64),
    "1.5b": ModelSizes(1_543_714_304, 151_936, 1536, 8960, 28, 12, 2, 128),
    "qwen3-0.6b": ModelSizes(596_049_920, 151_936, 1024, 3072, 28, 16, 8, 128, head_norms=True),
}
H100 = Computation(itemsize=2, on_gpu=True, memory=85_000_000_000)
# The H200 was measured before lagrpo had kernels of layers for GPUs, and before caches stayed.
H200 = Computation(itemsize=2, on_gpu=True, fused=False)


def settings_with(**sections: Any) -> Settings:
    base = {
        "loss": {"beta": 0.0},
        "eval": {"at_start": False},
        "checkpoint": {"save_minutes": 0.0},
    }
    return Settings.model_validate(base | sections)


def sizes_by_term(
    computation: Computation, sizes: ModelSizes = MILLION, **sections: Any
) -> dict[str, int]:
    settings = settings_with(**sections)
    terms = expected_memory(sizes, settings, check_settings(settings), computation)
    return {term.name: term.size for term in terms}


def weights_and_optimizer(by_term: dict[str, int]) -> dict[str, int]:
    names = (
        "weights",
        "weights that sample",
        "reference weights",
        "master weights",
        "gradient",
        "optimizer states",
    )
    return {name: by_term[name] for name in names if name in by_term}


PLAIN = {
    "weights": 2_000_000,
    "master weights": 2_000_000,
    "gradient": 4_000_000,
    "optimizer states": 8_000_000,
}


SHARDED = {
    "weights that sample": 2_000_000,
    "master weights": 1_000_000,
    "gradient": 1_000_000,
    "optimizer states": 2_000_000,
}
STALE = {"schedule": {"sync_every": 2}}


@pytest.mark.parametrize(
    ("changes", "sections", "expected"),
    [
        pytest.param({}, {}, PLAIN, id="bfloat16"),
        pytest.param(
            {"itemsize": 4},
            {},
            {
                "weights": 4_000_000,
                "gradient": 4_000_000,
                "optimizer states": 8_000_000,
            },
            id="float32",
        ),
        pytest.param(
            {}, {"loss": {"beta": 0.1}}, PLAIN | {"reference weights": 2_000_000}, id="reference"
        ),
        pytest.param(
            {},
            {"rollout": {"engine": "vllm"}},
            PLAIN,
            id="vllm",
        ),
        pytest.param(
            {},
            {"optimizer": {"offload_optimizer": True}},
            {name: size for name, size in PLAIN.items() if name != "optimizer states"},
            id="offloaded",
        ),
        pytest.param(
            {"ranks": 4},
            {},
            PLAIN | {"master weights": 500_000, "optimizer states": 2_000_000},
            id="zero1",
        ),
        pytest.param(
            {"ranks": 4},
            {"distributed": {"strategy": "fsdp2"}},
            SHARDED,
            id="fsdp2",
        ),
        pytest.param({}, STALE, PLAIN | {"weights that sample": 2_000_000}, id="stale"),
        pytest.param(
            {"ranks": 4},
            STALE | {"distributed": {"strategy": "fsdp2"}},
            SHARDED | {"weights that sample": 4_000_000},
            id="stale, fsdp2",
        ),
        pytest.param(
            {"fused": False},
            {"optimizer": {"gradient_checkpointing": True}},
            PLAIN | {"weights that sample": 2_000_000},
            id="modules in training mode",
        ),
    ],
)
def test_weights_and_optimizer_of_a_million_parameters_by_hand(changes, sections, expected):
    computation = replace(H100, **changes)
    assert weights_and_optimizer(sizes_by_term(computation, **sections)) == expected


def test_adapters_are_all_that_is_trained_and_copied():
    sizes = replace(MILLION, adapters=10_000)
    assert weights_and_optimizer(sizes_by_term(H100, sizes, model={"lora_r": 4})) == {
        "weights": 2_020_000,
        "master weights": 20_000,
        "gradient": 40_000,
        "optimizer states": 80_000,
    }


def test_masters_on_a_cpu_are_whole():
    assert sizes_by_term(Computation(itemsize=2))["master weights"] == 4_000_000


def test_packed_weights_come_on_top_of_the_weights_and_replace_layers_of_copies():
    computation = Computation(itemsize=2, packed=True)
    by_term = sizes_by_term(computation, schedule={"sync_every": 2})
    assert by_term["weights"] == 4_000_000
    assert by_term["weights that sample"] == 200_000 + 2_000_000


TIMED = {"checkpoint": {"save_minutes": 10.0}}


@pytest.mark.parametrize(
    ("changes", "sections", "size"),
    [
        pytest.param({}, TIMED, 12_000_000, id="by time"),
        pytest.param(
            {}, {"checkpoint": {"save_minutes": 0, "save_every": 9}}, 12_000_000, id="by batches"
        ),
        pytest.param({}, {}, None, id="only at the end"),
        pytest.param({"on_gpu": True}, TIMED, None, id="in another memory than the run"),
        pytest.param({"memory": 2**20}, TIMED, None, id="memory is short"),
        pytest.param({"ranks": 4}, TIMED, 3_000_000, id="ranks"),
        pytest.param({}, TIMED | STALE, 14_000_000, id="stale"),
        pytest.param({}, TIMED | {"loss": {"beta": 0.1}}, 14_000_000, id="reference"),
        pytest.param(
            {}, TIMED | {"optimizer": {"log_gradient_cosine": True}}, 16_000_000, id="last gradient"
        ),
    ],
)
def test_copy_for_a_checkpoint_by_hand(changes, sections, size):
    computation = replace(Computation(itemsize=2), **changes)
    assert sizes_by_term(computation, **sections).get("copy for a checkpoint") == size


def test_micro_batch_holds_whole_groups_that_fit():
    settings = settings_with(
        rollout={"num_generations": 4, "max_prompt_length": 10, "max_completion_length": 11},
        schedule={"prompts_per_batch": 6},
        optimizer={"micro_batch_tokens": 110},
    )
    # A group has 10 + 4 x 10 = 50 tokens: two fit, so three micro-batches have two each.
    largest = largest_micro_batch(settings, check_settings(settings), H100)
    assert (largest.rows, largest.tokens, largest.seen) == (100, 88, 20 + 8 * 20)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        pytest.param(
            "activations", {"optimizer": {"gradient_checkpointing": True}}, id="checkpointing"
        ),
        pytest.param("activations", {"optimizer": {"micro_batch_tokens": 600}}, id="tokens"),
        pytest.param("logits", {"optimizer": {"micro_batch_tokens": 600}}, id="logits"),
        pytest.param("keys and values", {"rollout": {"max_num_seqs": 16}}, id="rows"),
    ],
)
def test_setting_lowers_its_term(name, sections):
    assert sizes_by_term(H100, **sections)[name] < sizes_by_term(H100)[name]


@pytest.mark.parametrize(
    ("vllm", "phase"),
    [
        pytest.param({"server_args": ["--gpu-memory-utilization 0.3"]}, "always", id="awake"),
        pytest.param(
            {"server_args": ["--gpu-memory-utilization=0.3"], "sleep": True},
            "sampling",
            id="sleeps",
        ),
    ],
)
def test_server_on_the_same_gpu_takes_its_share(vllm, phase):
    settings = settings_with(rollout={"engine": "vllm"}, vllm=vllm)
    computation = replace(H100, memory=1000, shares_gpu=True)
    recipe = check_settings(settings_with())
    terms = expected_memory(MILLION, settings, recipe, computation)
    assert [(t.size, t.phase) for t in terms if t.name == "vLLM's share"] == [(300, phase)]


@pytest.mark.parametrize(
    ("memory", "sections", "phase"),
    [
        pytest.param(2**30, {}, "always", id="enough"),
        pytest.param(20 << 20, {}, "sampling", id="short, and the cache is idle"),
        pytest.param(
            20 << 20, {"schedule": {"sync_every": 2}}, "always", id="short, and the cache is in use"
        ),
        pytest.param(
            20 << 20, {"distributed": {"strategy": "fsdp2"}}, "always", id="short, layers in shards"
        ),
    ],
)
def test_cache_is_there_while_the_policy_learns_unless_the_run_drops_it(memory, sections, phase):
    settings = settings_with(
        rollout={"num_generations": 8, "max_prompt_length": 64, "max_completion_length": 64},
        schedule={"prompts_per_batch": 8} | sections.pop("schedule", {}),
        optimizer={"micro_batch_tokens": 512},
        **sections,
    )
    computation = Computation(itemsize=2, ranks=2, on_gpu=True, memory=memory)
    terms = expected_memory(MILLION, settings, check_settings(settings), computation)
    assert {term.name: term.phase for term in terms}[KEYS_AND_VALUES] == phase


@pytest.mark.parametrize(
    ("ranks", "packed", "size"),
    [(1, False, 8_000_000), (1, True, 12_000_000), (4, False, 2_000_000)],
    ids=["float32", "packed bfloat16", "in shards"],
)
def test_weights_of_a_teacher_count_by_its_own_size_and_dtype(ranks, packed, size):
    settings = settings_with(loss={"beta": 0.1}, distributed={"strategy": "fsdp2"})
    sizes = replace(MILLION, parameters=2_000_000 if not packed else 3_000_000, embedded=1)
    own = replace(H100, itemsize=2 if packed else 4, ranks=ranks, on_gpu=False, packed=packed)
    computation = replace(H100, ranks=ranks, on_gpu=False)
    terms = expected_memory(
        MILLION, settings, check_settings(settings), computation, Teacher(sizes, own)
    )
    assert [(t.size, t.advice) for t in terms if t.name == "reference weights"] == [
        (size, "a smaller loss.reference")
    ]


@pytest.mark.parametrize(
    ("phase", "expected"),
    [("sampling", 5 + 9), ("backward", 5 + 4 + 9), ("update", 5 + 4 + 9), ("always", 9 + 9)],
)
def test_peak_adds_what_is_there_at_a_time(phase, expected):
    terms = [Term("a", 5, ""), Term("b", 4, "x", "learning"), Term("c", 9, "y", phase)]
    assert peak(terms) == expected


def test_largest_term_is_there_at_the_peak_and_a_setting_lowers_it():
    terms = [
        Term("program", 9, ""),
        Term("weights", 3, "x"),
        Term("gradient", 4, "y", "learning"),
        Term("activations", 4, "y", "backward"),
        Term("cache", 7, "z", "sampling"),
    ]
    assert largest_term(terms).name == "gradient"


@pytest.mark.parametrize(
    ("memory", "warns", "fits"),
    [
        (84, True, False),
        (85, True, True),
        (99, True, True),
        (100, False, True),
        (None, False, True),
    ],
)
def test_run_above_the_memory_is_warned_of_and_rejected_if_the_estimate_cannot_be_that_wrong(
    memory, warns, fits
):
    terms = [Term("a", 60, ""), Term("c", 40, "rollout.x", "learning")]
    computation = Computation(itemsize=2, memory=memory)
    assert bool(memory_warning(terms, computation)) == warns
    with nullcontext() if fits else pytest.raises(SettingsError, match="rollout"):
        check_memory(terms, computation)


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_of_the_table_at_the_peak_add_up_to_its_total_for_a_rank_and_for_all(ranks):
    terms = [
        Term("weights", 2**30, "model.x"),
        Term("activations", 2**31, "optimizer.x", "backward"),
        Term("cache", 2**29, "rollout.x", "sampling"),
    ]
    heading, *lines = memory_table(terms, ranks)
    assert "GiB" in heading
    numbers = [re.findall(r"\d+\.\d+", line) for line in lines]
    expected = [[size * count for count in (1, ranks)[: min(ranks, 2)]] for size in (2, 1, 3)]
    assert [[float(text) for text in row] for row in numbers[:3]] == expected
    assert lines[2].split()[0] == "total"
    (cache,) = [line for line in lines[3:] if "cache" in line]
    assert "while sampling" in cache
    assert "rollout.x" in cache


# Beside what was measured


@pytest.fixture
def older_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the peaks on GPUs were measured, a copy sampled on-policy, too, and masters were whole
    beside their weights."""
    monkeypatch.setattr(memory, "_bytes_beside_weight", lambda c: {2: 4, 4: 0}[c.itemsize])
    monkeypatch.setattr(memory, "_samples_by_policy", lambda *_: False)


by_older_program = pytest.mark.usefixtures("older_program")


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


RUNS = {name: run for name, run in recorded("dry_run.json").items() if name != "machine"}


def test_peaks_of_runs_on_a_cpu_are_recorded():
    assert len(RUNS) >= 12


@pytest.mark.parametrize("name", RUNS)
def test_peak_of_a_run_on_a_cpu_is_expected(name):
    run = RUNS[name]
    settings = Settings.model_validate(run["settings"])
    terms = expected_memory(
        ModelSizes(**run["model"]),
        settings,
        check_settings(settings),
        Computation(**run["computation"]),
    )
    assert peak(terms) == pytest.approx(max(run["peaks"]), rel=ERROR)


SMOLLM2 = ModelSizes(134_515_008, 49_152, 576, 1536, 30, 9, 3, 64)
WITH_ADAPTERS = replace(SMOLLM2, adapters=4_884_480)
BY_C_KERNELS = Computation(itemsize=2, packed=True)
# The demo: 8 x 16 completions of at most 10 tokens. A prompt has 44 tokens.
DEMO = {"num_generations": 16, "max_prompt_length": 44, "max_completion_length": 10}
# The works of benchmarks/work.py, with the prompts that they had.
SHORT = DEMO | {"max_completion_length": 16}
LONG = {"num_generations": 8, "max_prompt_length": 117, "max_completion_length": 128}


def demo_peak(sizes: ModelSizes, computation: Computation, **sections: Any) -> int:
    settings = settings_with(rollout=DEMO, **sections)
    return peak(expected_memory(sizes, settings, check_settings(settings), computation))


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, "zero1"), (2, "zero1"), (2, "fsdp2"), (3, "zero1"), (3, "fsdp2")]
)
def test_peak_of_a_rank_of_the_demo_is_expected(ranks, strategy, beta):
    peaks = recorded("memory.json")[f"{ranks} ranks, {strategy}, beta {beta}"]["peaks"]
    computation = replace(BY_C_KERNELS, ranks=ranks, fused=strategy == "zero1")
    expected = demo_peak(
        SMOLLM2, computation, loss={"beta": beta}, distributed={"strategy": strategy}
    )
    assert expected == pytest.approx(max(peaks), rel=ERROR)


@pytest.mark.parametrize(
    ("side", "sizes", "model"),
    [
        pytest.param("full training", SMOLLM2, {}, id="full"),
        pytest.param("adapters", WITH_ADAPTERS, {"lora_r": 16}, id="adapters"),
    ],
)
def test_peak_of_the_demo_with_and_without_adapters_is_expected(side, sizes, model):
    peaks = recorded("lora.json")["peaks"][side]
    expected = demo_peak(sizes, BY_C_KERNELS, model=model)
    assert expected == pytest.approx(max(peaks), rel=ERROR)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointing"])
@pytest.mark.parametrize(
    ("work", "rollout", "prompts"), [("short", SHORT, 8), ("long", LONG, 4)], ids=["short", "long"]
)
def test_peak_by_tokens_of_a_micro_batch_is_expected(work, rollout, prompts, checkpointing):
    ending = "activation checkpointing " + ("on" if checkpointing else "off")
    (measured,) = [
        entry
        for name, entry in recorded("peak.json").items()
        if name.startswith(f"memory, {work}") and name.endswith(ending)
    ]
    settings = settings_with(
        rollout=rollout,
        schedule={"prompts_per_batch": prompts},
        optimizer={
            "micro_batch_tokens": measured["tokens"],
            "gradient_checkpointing": checkpointing,
        },
    )
    terms = expected_memory(SMOLLM2, settings, check_settings(settings), BY_C_KERNELS)
    peaks = [update["peak_bytes"] for update in measured["ours"]]
    assert peak(terms) == pytest.approx(max(peaks), rel=ERROR)


def terms_on_gpu(
    model: str, context: int, tokens: int, computation: Computation, **optimizer: Any
) -> list[Term]:
    """The terms of bench_gpu.py: a quarter of the context is the prompt."""
    settings = settings_with(
        rollout={
            "num_generations": 16,
            "max_prompt_length": context // 4,
            "max_completion_length": context - context // 4,
        },
        optimizer={"micro_batch_tokens": tokens, **optimizer},
    )
    return expected_memory(GPU_MODELS[model], settings, check_settings(settings), computation)


@pytest.mark.parametrize(
    ("file", "model", "context", "tokens", "computation"),
    [
        pytest.param("gpu.json", "1.5b", 512, 32_768, H100, id="H100-1.5b"),
        pytest.param("gpu.json", "0.5b", 512, 65_536, H100, id="H100-0.5b"),
        pytest.param("gpu.json", "135m", 512, 65_536, H100, id="H100-135m"),
        pytest.param("h200/gpu.json", "135m", 512, 32_768, H200, id="H200-135m"),
        pytest.param("h200/gpu.json", "135m", 1024, 32_768, H200, id="H200-135m-1024"),
        pytest.param("h200/gpu.json", "1.5b", 512, 32_768, H200, id="H200-1.5b"),
    ],
)
@by_older_program
def test_peak_of_learning_on_a_gpu_is_expected(file, model, context, tokens, computation):
    (measured,) = recorded(file)[f"{model}, {context}"]["memory of learning"]
    assert peak(terms_on_gpu(model, context, tokens, computation)) == pytest.approx(
        measured, rel=ERROR
    )


@pytest.mark.parametrize("model", ["1.5b", "0.5b", "135m"])
@by_older_program
def test_peak_of_sampling_on_a_gpu_is_expected(model):
    (measured,) = recorded("gpu.json")[f"{model}, 512"]["memory of sampling"]
    terms = terms_on_gpu(model, 512, 32_768, H100)
    terms = [term for term in terms if term.phase in ("always", "sampling")]
    assert peak(terms) == pytest.approx(measured, rel=ERROR)


def test_peak_of_long_sequences_with_checkpointing_on_a_gpu_is_expected():
    (measured,) = recorded("gpu.json")["qwen3-0.6b, 16384"]["memory of learning"]
    terms = terms_on_gpu("qwen3-0.6b", 16_384, 16_384, H100, gradient_checkpointing=True)
    # This measurement has no sampler.
    trainer = [t for t in terms if t.name not in {"weights that sample", KEYS_AND_VALUES}]
    assert peak(trainer) == pytest.approx(measured, rel=ERROR)
