"""Sharded layers (FSDP2): R processes make the updates of one.

Functions without `test_` run on the ranks (ranks.py), or with None as their group in this process,
whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from rank_updates import (
    DTYPES,
    Tensors,
    check_to_rounding,
    check_to_the_bit,
    copied,
    five_updates,
    ranks_of,
    rejected_update,
    rows_of,
    same,
    share,
    shortest_rows,
)
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tiny_policy, tiny_tokenizer
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_servers import engine_of

from lagrpo.core.recipes import resolve
from lagrpo.distributed.ranks import make_mesh
from lagrpo.errors import SettingsError
from lagrpo.model.backend import Backend, Choice
from lagrpo.model.model import Policy, copy_policy, sample_weights
from lagrpo.model.stored import StoredWeights
from lagrpo.rollout.vllm import weights as vllm_weights
from lagrpo.rollout.vllm.first_rank import FirstRankSampler
from lagrpo.rollout.vllm.group_queue import GroupQueue
from lagrpo.settings.schema import Settings
from lagrpo.startup.build import build_trainer
from lagrpo.startup.build_policy import build_policy, check_same_model
from lagrpo.training.entropy import EntropyTerm
from lagrpo.training.fsdp import ShardedWeights, copy_sharded, copy_whole
from lagrpo.training.optimizer import Optimization
from lagrpo.training.trainer import Trainer

# The kernels without panels: they compute sharded layers, too.
KERNELS = Backend(torch.device("cpu"), torch.bfloat16, kernels=True)


def make_layered(
    group: ProcessGroup | None,
    dtype: str,
    kind: str = "llama",
    tie: bool = False,
    backend: Backend | Choice = "torch",
    checkpointing: bool = False,
    beta: float = 0.0,
    entropy_coef: float = 0.0,
    **changes: Any,
) -> Trainer:
    """As `make_trainer`, in shards."""
    device = backend.device.type if isinstance(backend, Backend) else "cpu"
    policy = tiny_policy(
        kind, DTYPES[dtype], backend=backend, device=device, tie_word_embeddings=tie
    )
    numbers = {"lr": 1e-3, "updates": 9, "weight_decay": 0.1, "warmup": 2, "seed": 5} | changes
    mesh = make_mesh(group, device) if group is not None else None
    reference = None
    if beta:
        reference = copy_sharded(policy, mesh) if mesh is not None else copy_policy(policy)
    return Trainer(
        policy,
        resolve("grpo", {"beta": beta}),
        Optimization(**numbers),
        reference,
        entropy=EntropyTerm(entropy_coef),
        activation_checkpointing=checkpointing,
        ranks=ranks_of(group, mesh),
    )


def test_updates_with_sharded_layers_are_those_of_one_process_to_rounding(ranks):
    """In float64, where rounding is far below the steps. Three ranks divide no weight evenly."""
    # Clipped, so that a norm of a rank's own part would show: the limit is below all norms.
    options = {"dtype": "float64", "max_grad_norm": 0.05}
    alone = five_updates(None, options, False)
    assert min(line["grad_norm"] for line in alone.metrics) > 0.1
    check_to_rounding(ranks.run(five_updates, options, False, make_layered, size=3), alone)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        pytest.param(
            {"dtype": "bfloat16", "masters": "plain", "tie": True}, {}, id="plain masters"
        ),
        pytest.param(
            {"dtype": "bfloat16", "kind": "qwen3", "backend": KERNELS},
            {"checkpointing": True, "offload_moments": True},
            id="kernels, checkpointing and moments on the host",
        ),
        pytest.param(
            {"dtype": "float32", "kind": "qwen2", "backend": "c", "weight_decay": 0.0},
            {},
            id="kernels in float32, qwen2",
        ),
    ],
)
def test_updates_are_bit_equal_if_the_gradients_are(ranks, options, changes):
    """One rank has all rows, the other idles beside it: nothing is added but zeros. So the masters
    are dithered alike, and what is gathered is rounded as in one process. Without clipping, since
    norms are rounded in another order."""
    options = {"max_grad_norm": None, **options}
    results = ranks.run(five_updates, options | changes, True, make_layered, size=2)
    check_to_the_bit(results, five_updates(None, options, True))


class Pass(NamedTuple):
    """A forward pass over a short row."""

    saved: int
    """bytes that wait for the backward pass, without weights"""
    logp_T: Tensor
    sampler_logp_T: Tensor
    """by a whole copy of the weights"""
    is_exact: bool


def short_pass(group: ProcessGroup | None, backend: Backend, checkpointing: bool) -> Pass:
    """A pass in shards, or whole if there is no group."""
    trainer = make_layered(group, "bfloat16", "qwen3", backend=backend, checkpointing=checkpointing)
    policy = trainer.policy
    packed = shortest_rows(trainer, 1)[0].packed
    sizes: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        weights = [getattr(p, "_local_tensor", p) for p in policy.model.lm.parameters()]
        address = tensor.untyped_storage().data_ptr()
        if address not in {weight.untyped_storage().data_ptr() for weight in weights}:
            sizes[address] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        logp_T = policy.logp(packed)
    logp_T.sum().backward()
    whole = copy_policy(policy) if group is None else copy_whole(policy, trainer.skeleton, backend)
    with torch.no_grad():
        sampler_logp_T = whole.logp(packed)
    return Pass(sum(sizes.values()), logp_T.detach(), sampler_logp_T, policy.model.exact)


def check_passes(results: Sequence[Pass], alone: Pass) -> None:
    """Checks that sharded and whole layers save the same bytes, and give the same bits."""
    for one_pass in results:
        assert one_pass.saved == alone.saved
        assert one_pass.is_exact == alone.is_exact
        assert torch.equal(one_pass.logp_T, alone.logp_T)
        assert torch.equal(one_pass.logp_T, one_pass.sampler_logp_T)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointing"])
def test_kernels_save_as_much_in_shards_and_give_the_log_probs_of_the_sampler(ranks, checkpointing):
    results = ranks.run(short_pass, KERNELS, checkpointing, size=2)
    check_passes(results, short_pass(None, KERNELS, checkpointing))


# What a rank has


class Kept(NamedTuple):
    """What a rank keeps, in numbers."""

    masters: int
    gradients: int
    weights: int
    whole_weights: list[str]
    """the names of weights that it has whole"""


def measure_kept(group: ProcessGroup) -> Kept:
    trainer = make_layered(group, "bfloat16")
    trainer.accumulate(rows_of(trainer))
    parameters = dict(trainer.policy.model.lm.named_parameters())
    local_weights = {name: p._local_tensor for name, p in parameters.items()}
    gradients = [p.grad._local_tensor for p in parameters.values() if p.grad is not None]
    whole_weights = [name for name, p in parameters.items() if local_weights[name].shape == p.shape]
    # By storage, which includes what fills a shard up. Shards are float32: four bytes a number.
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in local_weights.values()}
    trainer.masters.zero_grads()
    return Kept(
        masters=sum(master.numel() for master in trainer.masters.parameters),
        gradients=sum(gradient.numel() for gradient in gradients),
        weights=sum(tensor.untyped_storage().nbytes() // 4 for tensor in storages.values()),
        whole_weights=whole_weights,
    )


def test_rank_keeps_its_part_of_masters_gradients_and_weights(ranks):
    """The rest is gathered for as long as it computes. What does not divide is filled up to whole
    rows: at most 5 % here."""
    numbers = sum(p.numel() for p in tiny_policy(dtype=torch.bfloat16).model.lm.parameters())
    for R in (2, 3):
        results = ranks.run(measure_kept, size=R)
        assert sum(held.masters for held in results) == numbers
        assert sum(held.gradients for held in results) == numbers
        for held in results:
            assert held.masters <= numbers / R * 1.05
            assert held.weights <= numbers / R * 1.05
            assert held.whole_weights == []


class ReferenceLogprobs(NamedTuple):
    """log π_ref of the rows of a batch."""

    at_start: list[Tensor]
    after_update: list[Tensor]
    after_stage: list[Tensor]


def reference_logprobs(group: ProcessGroup) -> ReferenceLogprobs:
    """An update and the end of a stage. On the way the policy's own log-probs stay as they were:
    policy and reference compute in turn, and must not leave their weights in each other's place."""
    trainer = make_layered(group, "bfloat16", beta=0.1)
    fresh = rows_of(trainer)

    def by_reference() -> list[Tensor]:
        return trainer.compute_logprobs(fresh, by=trainer.reference)

    at_start = by_reference()
    assert all(map(torch.equal, at_start, trainer.compute_logprobs(fresh)))
    trainer.accumulate([replace(row, ref_logp_T=at_start[n]) for n, row in enumerate(fresh)])
    trainer.update()
    policy_logprobs = trainer.compute_logprobs(fresh)
    after_update = by_reference()
    assert all(map(torch.equal, policy_logprobs, trainer.compute_logprobs(fresh)))

    trainer.end_stage(reset_optimizer=False)
    assert trainer.reference is not None
    assert trainer.reference.version == 1
    after_stage = by_reference()
    assert all(map(torch.equal, after_stage, trainer.compute_logprobs(fresh)))
    return ReferenceLogprobs(at_start, after_update, after_stage)


def test_reference_stays_until_the_stage_ends_and_then_is_the_policy(ranks):
    for logprobs in ranks.run(reference_logprobs, size=2):
        assert all(map(torch.equal, logprobs.at_start, logprobs.after_update))
        assert not any(map(torch.equal, logprobs.at_start, logprobs.after_stage))


# Gradients that are not finite


def test_gradient_not_finite_on_one_rank_is_rejected_on_all_ranks(ranks):
    pattern = r"the gradient of update 1 is not finite \(norm (inf|nan)\)"
    for rejected in ranks.run(rejected_update, 1, make_layered, size=2):
        assert re.match(pattern, rejected.message)
        assert rejected.is_unchanged
        assert rejected.goes_on


# Weights that every rank reads from files


class Synced(NamedTuple):
    """A whole copy on a rank after a weight sync."""

    reads: int
    weights: int
    has_sample_of_copy: bool
    stale: list[str]
    stale_after_change: list[str]


def sync_whole_copy(group: ProcessGroup) -> Synced:
    """Makes the parts of a weight sync. Then a number of a row of rank 0 changes on rank 1."""
    trainer = make_layered(group, "bfloat16")
    weights = trainer.policy.weights
    whole = copy_whole(trainer.policy, trainer.skeleton, trainer.policy.model.backend)
    read = ShardedWeights.__getitem__
    with (
        patch.object(ShardedWeights, "__getitem__", autospec=True, side_effect=read) as reading,
        patch("lagrpo.model.model.SAMPLE", 100),
    ):
        whole.load(weights, 1)
        sample = sample_weights(weights)
        stale = weights.find_stale(whole.weights)
        sample_of_copy = sample_weights(whole.weights)
    if group.rank() == 1:
        with torch.no_grad():
            next(iter(whole.model.parameters())).view(-1)[0] += 1
    return Synced(
        reads=reading.call_count,
        weights=len(weights),
        has_sample_of_copy=all(map(torch.equal, sample, sample_of_copy)),
        stale=stale,
        stale_after_change=weights.find_stale(whole.weights),
    )


def test_weight_sync_gathers_once_and_finds_a_changed_copy(ranks):
    for rank, synced in enumerate(ranks.run(sync_whole_copy)):
        assert synced.reads == synced.weights
        assert synced.has_sample_of_copy
        assert synced.stale == []
        assert len(synced.stale_after_change) == (rank == 1)


def send_to_servers(group: ProcessGroup) -> tuple[str, int, list[str], int]:
    """Syncs weights with servers, of which there are none; at first the disk of rank 0 is full.

    A bucket has one weight. Returns the error, the number of gathered weights, those that differ
    from the written ones, and the number of files of rank 0.
    """
    trainer = make_layered(group, "bfloat16")
    policy = trainer.policy
    engine = engine_of([], policy) if group.rank() == 0 else None
    sampler = FirstRankSampler(trainer.ranks, engine)
    error = ""
    with patch.object(vllm_weights, "save_file", side_effect=OSError("full")):
        try:
            sampler.sync_weights(policy.weights, 1)
        except OSError as raised:
            error = str(raised)
    read = ShardedWeights.__getitem__
    with (
        patch.object(ShardedWeights, "__getitem__", autospec=True, side_effect=read) as reading,
        patch.object(vllm_weights, "BUCKET", 1),
        patch.object(GroupQueue, "ask_all", return_value={}),
    ):
        sampler.sync_weights(policy.weights, 1)
    _, written = sampler.current_weights()
    differing = [
        name
        for name, tensor in policy.weights.items()
        if group.rank() == 0 and not torch.equal(written[name], tensor)
    ]
    files = list(engine.weights.root.glob("*/*")) if engine is not None else []
    sampler.close()
    return error, reading.call_count, differing, len(files)


def test_weights_for_servers_are_gathered_one_by_one_and_an_error_ends_all_ranks(ranks):
    num_weights = len(tiny_policy().weights)
    first, second = ranks.run(send_to_servers, size=2)
    assert first == ("full", num_weights, [], num_weights)
    assert second == ("full", num_weights, [], 0)


def save(
    directory: Path, dtype: str, kind: str = "llama", max_file: str = "1GB", **changes: Any
) -> str:
    """Saves a tiny model with weights of a dtype, in files of at most `max_file`."""
    model = tiny_model(kind, **changes).to(DTYPES[dtype])
    model.save_pretrained(directory, max_shard_size=max_file)
    tiny_tokenizer().save_pretrained(directory)
    return str(directory)


def change_weights(directory: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the tensors of model.safetensors."""
    file = Path(directory) / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def build_sharded(
    group: ProcessGroup, path: str, dtype: str, *, is_sharded: bool = True
) -> tuple[Policy, Trainer]:
    """The policy and the trainer of a run; the policy is loaded whole if not `is_sharded`."""
    ranks = ranks_of(group, make_mesh(group, "cpu"))
    assert ranks is not None
    settings = Settings.model_validate({"model": {"path": path, "dtype": dtype}})
    policy = build_policy(settings.model, 1.0, 64, is_sharded=is_sharded)
    check_same_model(ranks, policy)
    return policy, build_trainer(settings, resolve("grpo", {"beta": 0.1}), policy, ranks)


def learn_from_files(
    group: ProcessGroup, path: str, dtype: str, is_sharded: bool
) -> dict[str, Tensors]:
    """All tensors of a trainer at the start, and what two updates make of them."""
    policy, trainer = build_sharded(group, path, dtype, is_sharded=is_sharded)
    assert isinstance(policy.weights, StoredWeights) == is_sharded
    assert trainer.reference is not None
    tensors: dict[str, Tensors] = {
        "start": copied(trainer.state()),
        "buffers": copied(dict(trainer.policy.model.lm.named_buffers())),
        "reference": copied(trainer.reference.weights),
    }
    for batch in (1, 2):
        rows = share(group, rows_of(trainer, batch), False)
        ref_logps = trainer.compute_logprobs(rows, by=trainer.reference)
        tensors[f"reference's log-probs {batch}"] = dict(zip("abcdefgh", ref_logps, strict=False))
        trainer.accumulate(
            [replace(row, ref_logp_T=logp) for row, logp in zip(rows, ref_logps, strict=True)]
        )
        trainer.update()
    return tensors | {"state": copied(trainer.state()), "weights": copied(trainer.policy.weights)}


def differing(group: ProcessGroup, path: str, dtype: str) -> list[str]:
    """What differs between a model that is read in shards and one that is loaded whole."""
    read = learn_from_files(group, path, dtype, is_sharded=True)
    loaded = learn_from_files(group, path, dtype, is_sharded=False)
    return [name for name, tensors in loaded.items() if not same(read[name], tensors)]


@pytest.mark.parametrize(
    ("size", "dtype", "saved"),
    [
        pytest.param(2, "bfloat16", {"dtype": "bfloat16"}, id="one file"),
        pytest.param(
            3,
            "bfloat16",
            {
                "dtype": "bfloat16",
                "max_file": "5KB",
                "tie_word_embeddings": True,
                "hidden_size": 4,
            },
            id="several files, tied, a rank without norms",
        ),
        pytest.param(2, "bfloat16", {"dtype": "float32", "kind": "phi3"}, id="saved in float32"),
        pytest.param(3, "float32", {"dtype": "bfloat16", "kind": "qwen2"}, id="in float32"),
    ],
)
def test_shards_read_from_files_learn_as_those_of_a_whole_model(
    ranks, tmp_path, size, dtype, saved
):
    """To the bit. Three ranks divide no weight evenly; the last has nothing of a norm of 4."""
    path = save(tmp_path, **saved)
    assert ranks.run(differing, path, dtype, size=size) == [[]] * size


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor for which memory is allocated meanwhile. Views and `set_` need none:
    with these safetensors makes tensors of a file that is mapped into memory."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket == torch.ops.aten.set_:
            return result
        for tensor in result if isinstance(result, list | tuple) else [result]:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(local, Tensor) and not local.is_meta:
                self.numbers = max(self.numbers, local.numel())
        return result


class Read(NamedTuple):
    """What a rank has read, in numbers."""

    total: int
    largest_tensor: int


def measure_reading(group: ProcessGroup, path: str) -> Read:
    """Watches a rank while its empty model gets weights."""
    ranks = ranks_of(group, make_mesh(group, "cpu"))
    settings = Settings.model_validate({"model": {"path": path, "dtype": "bfloat16"}})
    read_rows = StoredWeights.rows
    total = 0

    def count(weights: StoredWeights, name: str, first: int, stop: int) -> Tensor:
        nonlocal total
        rows = read_rows(weights, name, first, stop)
        total += rows.numel()
        return rows

    policy = build_policy(settings.model, 1.0, 64, is_sharded=True)
    assert all(parameter.is_meta for parameter in policy.model.parameters())
    with pytest.MonkeyPatch.context() as patch, LargestTensor() as largest:
        patch.setattr(StoredWeights, "rows", count)
        Trainer(policy, resolve("grpo", {"beta": 0.0}), Optimization(lr=1e-3), ranks=ranks)
    return Read(total, largest.numbers)


def test_rank_reads_its_rows_and_never_has_a_whole_weight(ranks, tmp_path):
    path = save(tmp_path, "bfloat16", max_file="20KB")
    sizes = [parameter.numel() for parameter in tiny_model().parameters()]
    results = ranks.run(measure_reading, path, size=3)
    assert sum(read.total for read in results) == sum(sizes)
    for read in results:
        assert read.total <= sum(sizes) / 3 * 1.05
        # Filled up to whole rows, as in the shards.
        assert read.largest_tensor <= max(sizes) / 3 * 1.05


def reason_of_rejection(group: ProcessGroup, paths: Sequence[str]) -> str:
    with pytest.raises(SettingsError) as rejected:
        build_sharded(group, paths[group.rank()], "bfloat16")
    return str(rejected.value)


def set_last_number(weights: dict[str, Tensor], name: str) -> None:
    """To NaN. Only the last rank has it."""
    weights[name].view(-1)[-1] = torch.nan


def store_another_head(weights: dict[str, Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(
            partial(set_last_number, name="model.norm.weight"),
            r"1 of 32 numbers in model\.norm\.weight are not finite in bfloat16",
            id="not finite",
        ),
        pytest.param(store_another_head, "different output head: untie it", id="another head"),
        pytest.param(
            lambda weights: weights.pop("model.norm.weight"),
            r"the files lack weights of the model: model\.norm\.weight",
            id="missing",
        ),
    ],
)
def test_damaged_weights_are_rejected_on_all_ranks(ranks, tmp_path, change, reason):
    path = save(tmp_path, "bfloat16", tie_word_embeddings=True)
    change_weights(path, change)
    for rejected in ranks.run(reason_of_rejection, [path, path], size=2):
        assert re.search(reason, rejected)


def test_ranks_that_read_different_models_are_rejected(ranks, tmp_path):
    paths = [save(tmp_path / f"{seed}", "bfloat16", seed=seed) for seed in (0, 1)]
    for rejected in ranks.run(reason_of_rejection, paths, size=2):
        assert rejected == "model.path: model weights differ between ranks 0 and 1"


def read_tied_head(group: ProcessGroup, path: str) -> bool:
    policy, trainer = build_sharded(group, path, "bfloat16")
    lm = trainer.policy.model.lm
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    return isinstance(policy.weights, StoredWeights)


def test_head_that_is_tied_and_stored_all_the_same_is_read(ranks, tmp_path):
    path = save(tmp_path, "bfloat16", tie_word_embeddings=True)
    change_weights(
        path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()})
    )
    assert ranks.run(read_tied_head, path, size=2) == [True, True]


def load_whole(group: ProcessGroup, path: str) -> bool:
    policy, _ = build_sharded(group, path, "bfloat16")
    return isinstance(policy.weights, StoredWeights)


def test_model_under_other_names_is_loaded_whole(ranks, tmp_path):
    """A file has a buffer that transformers no longer stores."""
    path = save(tmp_path, "bfloat16")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(path, lambda w: w.update({name: torch.ones(16)}))
    assert ranks.run(load_whole, path, size=2) == [False, False]
