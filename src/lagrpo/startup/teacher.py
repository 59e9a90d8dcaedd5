"""From settings to the teacher: a reference that is another model than the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from lagrpo.core.objective import Recipe
from lagrpo.distributed.ranks import Ranks, add_up
from lagrpo.distributed.torchrun import world_size
from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.model.directory import check_weights
from lagrpo.model.embedded import is_adapter, resolve_model
from lagrpo.model.files import TOKENIZER_CONFIG, find_source, load_tokenizer
from lagrpo.model.loading import (
    check_attention,
    check_context,
    check_files,
    count_not_finite,
    load_config,
    make_empty_model,
    raise_if_not_finite,
)
from lagrpo.model.lora import check_fits, find_base, load_adapter
from lagrpo.model.model import Policy, Weights
from lagrpo.model.stored import StoredWeights
from lagrpo.resume.model_files import ModelFiles, read_forward_files
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import ModelSettings
from lagrpo.startup.build_episodes import max_reply_tokens
from lagrpo.startup.build_policy import build_policy, check_same_model, loading
from lagrpo.startup.checks import read_reference_prompt
from lagrpo.tasks import Task
from lagrpo.training import fsdp

SETTING = "loss.reference"


def read_teacher_files(settings: Settings) -> ModelFiles:
    """Returns the entries of the configs of the teacher and its adapter; none without a teacher."""
    if settings.loss.reference is None:
        return {}
    path = resolve_model(settings.loss.reference)
    return {**read_forward_files(find_base(path)), **read_forward_files(path)}


def teacher_dtype(config: Any) -> Literal["auto", "float32"]:
    """Returns the setting for the dtype of a model: its own, as far as the hardware has it."""
    dtype = str(getattr(config.get_text_config(), "dtype", None)).removeprefix("torch.")
    return "float32" if dtype == "float32" else "auto"


def longest_sequence(settings: Settings, *tasks: Task) -> int:
    """Returns the tokens of the longest sequence that the policy or its reference reads."""
    reply_tokens = max_reply_tokens(settings, *tasks)
    longest = settings.max_sequence_length + reply_tokens
    reference_prompt = read_reference_prompt(settings)
    if reference_prompt is not None and reference_prompt.reads_best:
        # The best completion stands in the prompt, too.
        longest += settings.rollout.max_completion_length + reply_tokens
    return longest


def check_teacher(settings: Settings, recipe: Recipe, longest: int) -> None:
    """Checks the files of the teacher, if there is one, for sequences of `longest` tokens.

    Loads no weights but those of adapters. Raises SettingsError for a model that lagrpo does not
    support, for one with too few positions, for missing or damaged weights, for another vocabulary
    than the policy's, and if a recipe without a reward has no teacher.
    """
    name = settings.loss.reference
    if recipe.ignores_reward and name is None and settings.loss.reference_prompt is None:
        raise SettingsError(
            f"loss.recipe = {recipe.name!r} learns from a teacher alone, and the policy's own "
            f"start teaches nothing: set {SETTING} or {SETTING}_prompt"
        )
    if name is None:
        return
    is_sharded = world_size() > 1 and settings.distributed.strategy == "fsdp2"
    if is_sharded and is_adapter(Path(name).expanduser()):
        raise SettingsError(
            f"{SETTING} = {name!r} is an adapter, which distributed.strategy = 'fsdp2' cannot "
            "shard: merge it with PEFT's merge_and_unload, or use 'zero1'"
        )
    with loading(settings.model.path):
        base = find_base(resolve_model(settings.model.path))
        vocabulary = load_config(base).get_text_config().vocab_size
        tokens = load_tokenizer(base).get_vocab()
    with loading(name, SETTING):
        path = resolve_model(name)
        base = find_base(path)
        tokenizer = check_files(base)
        if find_source(path, TOKENIZER_CONFIG) is not None:
            tokenizer = load_tokenizer(path)
        config = load_config(base)
        check_context(config, longest)
        check_weight_files(path, config)
    with as_settings_error(f"{SETTING} = {name!r}"):
        check_vocabulary(tokens, tokenizer.get_vocab())
        rows = config.get_text_config().vocab_size
        if rows < vocabulary:
            raise ValueError(
                f"it has logits of {rows:,} tokens, the policy of {vocabulary:,}: use a teacher "
                "with at least as many"
            )


def check_weight_files(path: str, config: Any) -> None:
    """Raises ValueError for weights that are missing or damaged, and adapters that do not fit.

    `config` is that of the whole model. Weights on the hub are not checked.
    """
    base = find_base(path)
    # With this entry, transformers reads another file.
    names_other_file = getattr(config, "transformers_weights", None) is not None
    if Path(base).is_dir() and not names_other_file:
        check_weights(Path(base))
    if base != path:
        lora, weights = load_adapter(Path(path))
        check_fits(make_empty_model(base, torch.float32), lora, weights)


def check_vocabulary(tokens: dict[str, int], teacher_tokens: dict[str, int]) -> None:
    """Raises ValueError unless the teacher has every token of the policy, with the same id.

    Both map texts of tokens to ids. The teacher may have more tokens.
    """
    texts = {token_id: text for text, token_id in teacher_tokens.items()}
    differing = sorted(
        token_id for text, token_id in tokens.items() if teacher_tokens.get(text) != token_id
    )
    if differing:
        first = differing[0]
        text = next(text for text, token_id in tokens.items() if token_id == first)
        theirs = f"is {texts[first]!r}" if first in texts else "does not exist"
        raise ValueError(
            f"its vocabulary is not the policy's: token {first} {theirs}, not {text!r} "
            f"({len(differing):,} tokens differ). Use a teacher with the tokenizer of model.path"
        )


def build_teacher(settings: Settings, policy: Policy, longest: int, ranks: Ranks) -> Policy:
    """Returns the model of loss.reference, in shards if layers are sharded.

    It computes in its own dtype, and at the temperature of the policy. Collective. Raises
    SettingsError.
    """
    name = settings.loss.reference
    assert name is not None
    with loading(name, SETTING):
        config = load_config(find_base(resolve_model(name)))
    teacher = build_policy(
        ModelSettings(path=name, dtype=teacher_dtype(config)),
        policy.tau,
        longest,
        is_sharded=ranks.mesh is not None,
        teaches=policy.chat,
    )
    check_same_model(ranks, teacher, SETTING)
    if ranks.mesh is None:
        return teacher
    teacher = fsdp.without_panels(teacher)
    sharded = fsdp.copy_sharded(teacher, ranks.mesh)
    if isinstance(teacher.weights, StoredWeights):
        with loading(name, SETTING):
            sharded.load(teacher.weights, 0)
            check_finite_rows(sharded, ranks)
            check_attention(sharded)
            fsdp.free_gathered(sharded.model)
    return sharded


def check_finite_rows(policy: Policy, ranks: Ranks) -> None:
    """Raises ValueError for a weight with values that are not finite, if layers are sharded.

    Each rank looks at its own rows. Collective.
    """
    weights: Weights = policy.weights
    assert isinstance(weights, fsdp.ShardedWeights)
    counts: dict[str, float] = {}
    for name, sharded in weights.shards.items():
        counts[name] = count_not_finite(fsdp.local_shard(sharded))
    for name, count in add_up(ranks.gather(counts)).items():
        numbers = weights.shards[name].shape.numel()
        raise_if_not_finite(name, int(count), numbers, policy.dtype)
