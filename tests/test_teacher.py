"""A reference that is another model, or that sees other prompts: distillation."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_runs import FIRST_STEP, find_differences, set_cell
from chaos import leaves, merged
from ranks import together
from running import tiny_settings
from safetensors.torch import load_file
from test_batch import groups_of
from test_resume import cut_to, differing, go_on
from test_together import only_result, sharded
from test_trainer import assembled
from tiny import save_tiny, tiny_policy

from lagrpo import train
from lagrpo.core.recipes import resolve
from lagrpo.errors import SettingsError
from lagrpo.model.backend import choose_backend
from lagrpo.model.embedded import ADAPTER_CONFIG
from lagrpo.model.loading import load_policy, open_policy
from lagrpo.model.lora import ADAPTER_WEIGHTS, Lora
from lagrpo.model.model import Packed, copy_policy
from lagrpo.model.reference_prompt import ReferencePrompt, find_best
from lagrpo.runs import load_rollouts
from lagrpo.training.optimizer import Optimization
from lagrpo.training.trainer import Trainer
from lagrpo.types import Group, JsonObject, Prompt
from lagrpo.verify import verify_run

HINT = "{{ prompt }} {{ answer }}"
BEST = "{{ prompt }} {{ best_completion }}"
LOSS = {"recipe": "own_functions:distilled"}
LARGER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "seed": 3,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A larger model, whose head has padding rows."""
    return save_tiny(tmp_path_factory.mktemp("teachers") / "larger", vocab_size=128, **LARGER)


def settings_of(model: Path, root: Path, /, **sections: Any) -> dict[str, JsonObject]:
    base = {
        "run": {"name": "run"},
        "loss": LOSS,
        "schedule": {"batches": 4},
        "checkpoint": {"save_every": 1, "save_minutes": 0, "save_total_limit": 9},
    }
    return merged(tiny_settings(model, root), base, sections)


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """Adapters of the policy's model whose B are not 0."""
    policy = load_policy(str(model), torch.float32, lora=Lora(2, 4.0))
    with torch.no_grad():
        for name, weight in policy.weights.items():
            weight.add_(0.5 * name.endswith("lora_B"))
    folder = tmp_path_factory.mktemp("teachers") / "adapter"
    policy.save(folder)
    return folder


@pytest.fixture(scope="module")
def taught(model, teacher, tmp_path_factory):
    """A run in bfloat16 whose teacher sees the best completion. Tests leave it as it is."""
    return train(
        settings_of(
            model,
            tmp_path_factory.mktemp("taught"),
            model={"dtype": "bfloat16"},
            loss={"reference": str(teacher), "reference_prompt": BEST},
            checkpoint={"export_every": 1},
        )
    ).run


# What is rejected before weights load


def swap_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("dry_run", [False, True], ids=["run", "dry run"])
@pytest.mark.parametrize(
    ("changes", "damage", "named"),
    [
        pytest.param({}, swap_tokens, "token 13 is 'b', not 'a'", id="tokens swapped"),
        pytest.param({"vocab_size": 100}, None, "logits of 100 tokens", id="fewer logits"),
        pytest.param({"max_position_embeddings": 60}, None, "position", id="short context"),
    ],
)
def test_teacher_that_does_not_fit_is_rejected_before_weights_load(
    model, tmp_path, dry_run, changes, damage, named
):
    folder = save_tiny(tmp_path / "teacher", **changes)
    if damage is not None:
        damage(folder)
    (folder / "model.safetensors").unlink()
    shutil.copy(model / "model.safetensors", folder)  # sound, in another shape
    settings = settings_of(model, tmp_path, loss={"reference": str(folder)})
    with pytest.raises(SettingsError, match=r"loss\.reference") as error:
        train(settings, dry_run=dry_run)
    assert named in str(error.value)


def change_adapter_config(folder: Path, **values: object) -> None:
    file = folder / ADAPTER_CONFIG
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | values), encoding="utf-8")


def name_itself_as_model(folder: Path) -> None:
    copied = shutil.copytree(folder, folder.parent / "other")
    change_adapter_config(folder, base_model_name_or_path=str(copied))


def name_larger_model(folder: Path) -> None:
    larger = save_tiny(folder.parent / "larger", **LARGER)
    change_adapter_config(folder, base_model_name_or_path=str(larger))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        pytest.param(lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), "read", id="no weights"),
        pytest.param(partial(change_adapter_config, r=3), "shape", id="another rank"),
        pytest.param(name_larger_model, "shape", id="adapters of another model"),
        pytest.param(name_itself_as_model, "an adapter, too", id="adapters of adapters"),
    ],
)
def test_adapter_as_teacher_that_does_not_fit_is_rejected_by_a_dry_run(
    adapter, model, tmp_path, damage, named
):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    damage(folder)
    settings = settings_of(model, tmp_path, loss={"reference": str(folder)})
    with pytest.raises(SettingsError, match=r"loss\.reference") as error:
        train(settings, dry_run=True)
    assert named in str(error.value)


def test_teacher_without_weights_is_rejected_by_a_dry_run(model, tmp_path):
    folder = save_tiny(tmp_path / "teacher")
    (folder / "model.safetensors").unlink()
    with pytest.raises(SettingsError, match=r"loss\.reference"):
        train(settings_of(model, tmp_path, loss={"reference": str(folder)}), dry_run=True)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        pytest.param(
            {"loss": {"recipe": "dapo", "reference": "gpt2"}}, "loss.beta", id="no reader"
        ),
        pytest.param(
            {"loss": {"recipe": "dapo", "reference_prompt": HINT}}, "loss.beta", id="unread prompt"
        ),
        pytest.param(
            {"loss": {"reference": "gpt2"}, "schedule": {"ref_sync_every": 2}},
            "ref_sync_every",
            id="swapped",
        ),
        pytest.param({"loss": {"recipe": "opd"}}, "loss.reference", id="no teacher"),
        pytest.param(
            {
                "loss": {"recipe": "opd", "reference_prompt": HINT},
                "rollout": {"dynamic_sampling_rounds": 1},
            },
            "dynamic_sampling_rounds",
            id="rewards that are not read",
        ),
        pytest.param({"loss": {"reference": "/nowhere"}}, "/nowhere", id="no directory"),
        pytest.param({"loss": {"reference_prompt": "no.jinja"}}, "no.jinja", id="no file"),
        pytest.param({"loss": {"reference_prompt": "{{ prompt "}}, "Jinja", id="no template"),
        pytest.param({"loss": {"reference_prompt": "{{ row.hint }}"}}, "'hint'", id="no column"),
        pytest.param({"loss": {"reference_prompt": "{{ '' }}"}}, "empty", id="empty text"),
        pytest.param({"loss": {"reference_prompt": ""}}, "empty", id="empty template"),
        pytest.param(
            {"loss": {"reference_prompt": "{{ prompt * 99 }}"}}, "max_prompt_length", id="too long"
        ),
    ],
)
def test_reference_that_contradicts_other_settings_is_rejected_in_a_line(
    model, tmp_path, sections, named
):
    with pytest.raises(SettingsError) as error:
        train(settings_of(model, tmp_path, **sections), dry_run=True)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rewards", "smallest", "best"),
    [
        pytest.param([0.0, 0.5, 1.0, 0.0], 0.0, "c", id="the highest reward"),
        pytest.param([0.0, 1.0, 1.0, 1.0], 0.0, "b", id="the first of equals"),
        pytest.param([None, 0.5, None, 0.0], 0.0, "b", id="without a reward"),
        pytest.param([-1.0, -0.5, -1.0, -1.0], -1.0, "b", id="a negative range"),
        pytest.param([0.0, 0.0, None, 0.0], 0.0, "", id="nothing above the lowest"),
        pytest.param([None, None, None, None], 0.0, "", id="no rewards at all"),
    ],
)
def test_best_completion_has_the_highest_reward_above_the_lowest(rewards, smallest, best):
    assert find_best(rewards, ["a", "b", "c", "d"], smallest) == best


@pytest.mark.parametrize(
    ("best", "limit", "more"),
    [
        pytest.param("abc", 23, 4, id="at the limit"),
        pytest.param("abc", 22, 0, id="too long"),
        pytest.param("", 23, 0, id="no best completion"),
    ],
)
def test_reference_sees_the_best_completion_if_there_is_one_and_it_fits(best, limit, more):
    chat = tiny_policy().chat
    prompt = chat.tokenize(Prompt(1, ({"role": "user", "content": "x?"},), ""))
    seen_ids = ReferencePrompt(BEST).tokenize_with_best(chat, prompt, best, limit)
    assert len(seen_ids) == len(prompt.token_ids) + more


# Log-probs


def two_groups() -> list[Group]:
    groups = groups_of([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    hinted = Prompt(1, (), "", (5, 6), reference_token_ids=(9, 8, 7, 5, 6))
    return [groups[0], Group(hinted, groups[1].completions)]


@pytest.mark.parametrize("tokens", [1, 5, 99])
def test_log_probs_of_the_teacher_are_behind_its_own_prompts_however_rows_are_packed(tokens):
    teacher = tiny_policy(hidden_size=64, seed=3)
    recipe = resolve("grpo", {"beta": 0.1})
    trainer = Trainer(tiny_policy(), recipe, Optimization(lr=1e-3), teacher, has_teacher=True)
    found: dict[int, torch.Tensor] = {}
    for row in trainer.pack(assembled(recipe, two_groups()), tokens):
        assert row.ref_logp_T is not None
        found |= dict(zip(row.members, row.ref_logp_T.split(2), strict=True))
    for c, prompt in enumerate([(5, 6)] * 3 + [(9, 8, 7, 5, 6)] * 3):
        alone = teacher.logp(Packed.build([(prompt, [torch.tensor([3, 4])])]))
        torch.testing.assert_close(found[c], alone.detach(), rtol=0, atol=1e-5)


def test_sharded_teacher_stays_in_its_files_although_its_head_has_more_rows(teacher):
    policy = tiny_policy()
    backend = choose_backend("torch", "cpu", torch.float32)
    opened = open_policy(str(teacher), torch.float32, backend, teaches=policy.chat)
    assert opened is not None
    assert opened.weights.shapes()["lm_head.weight"] == (103, 64)


def test_teacher_stays_at_the_end_of_a_stage():
    policy = tiny_policy()
    teacher = copy_policy(policy)
    recipe = resolve("grpo", {"beta": 0.1})
    trainer = Trainer(policy, recipe, Optimization(lr=1e-3), teacher, has_teacher=True)
    policy.advance()
    trainer.end_stage(reset_optimizer=False)
    assert teacher.version == 0


def test_logits_beyond_the_vocabulary_of_the_policy_do_not_count(taught, teacher):
    """The head of the teacher has 128 rows, and the softmax goes over 103."""
    from transformers import AutoModelForCausalLM

    row = load_rollouts(taught, [1])[0]
    lm = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    ids = torch.tensor([[*row["ref_prompt_token_ids"], *row["token_ids"]]])
    with torch.no_grad():
        logp_TV = lm(ids).logits[0, :-1, :103].log_softmax(-1)
    count = len(row["token_ids"])
    expected = logp_TV[-count:].gather(1, ids[0, -count:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(row["ref_logprobs"]), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_moves_if_the_teacher_is_the_policy_and_rewards_are_equal(model, tmp_path, dtype):
    copied = tmp_path / "teacher"
    train_as = partial(settings_of, model, tmp_path, model={"dtype": dtype})
    initial = save_tiny(copied)
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    (copied / "config.json").write_text(json.dumps(config | {"dtype": dtype}), encoding="utf-8")
    rewards = [{"reward": "sample_rewards:constant"}]
    result = train(
        train_as(loss={"reference": str(copied)}, task={"rewards": rewards}, eval={"every": 0})
    )
    assert result.version == 4
    assert result.weights is not None
    final = load_file(result.weights / "model.safetensors")
    for name, weight in load_file(initial / "model.safetensors").items():
        assert torch.equal(final[name], weight.to(final[name].dtype)), name


# Runs


def test_run_with_a_teacher_agrees_with_its_replay(taught):
    report = verify_run(taught, None, trust_run_code=True)
    assert report.differences == []
    tokens = sum(len(row["token_ids"]) for row in load_rollouts(taught))
    assert report.compared["ref_logprobs"] == tokens


def test_run_of_adapters_with_an_adapter_as_teacher_agrees_with_its_replay(
    model, adapter, tmp_path
):
    loss = {"recipe": "opd", "reference": str(adapter)}
    settings = settings_of(model, tmp_path, model={"lora_r": 2}, loss=loss)
    run = train(settings).run
    report = verify_run(run, 8, trust_run_code=True)
    assert report.differences == []
    assert report.compared["ref_logprobs"] > 0
    (row, *_) = load_rollouts(run, [1])
    assert row["ref_logprobs"] != row["old_logprobs"]


@pytest.mark.parametrize(
    ("column", "change"),
    [
        pytest.param("ref_logprobs", lambda values: [values[0] + 1, *values[1:]], id="log-prob"),
        pytest.param("ref_prompt_token_ids", lambda values: [*values[:-1], 7], id="prompt"),
    ],
)
def test_replay_finds_a_changed_value_of_the_reference(taught, tmp_path, column, change):
    run = shutil.copytree(taught, tmp_path / "run")
    row = load_rollouts(run, [1])[0]
    set_cell(run, 0, column, change(row[column]))
    assert find_differences(run, FIRST_STEP, column, recomputed=None)


def test_reference_prompt_reaches_the_reference_alone(model, tmp_path):
    """The reference is the policy at the start, and a swap makes the policy the reference."""
    runs = [
        train(
            settings_of(
                model,
                tmp_path,
                run={"name": name},
                loss=loss,
                schedule={"ref_sync_every": 2},
                checkpoint={"export_every": 1},
            )
        ).run
        for name, loss in (("plain", {}), ("hinted", {"reference_prompt": HINT}))
    ]
    plain, hinted = (load_rollouts(run, [1]) for run in runs)
    for row, other in zip(plain, hinted, strict=True):
        assert row["prompt_token_ids"] == other["prompt_token_ids"]
        assert row["token_ids"] == other["token_ids"]
        assert row["ref_logprobs"] == row["old_logprobs"]
        assert row["ref_logprobs"] != other["ref_logprobs"]
        assert len(other["ref_prompt_token_ids"]) > len(row["prompt_token_ids"])
    assert verify_run(runs[1], 12, trust_run_code=True).differences == []


def test_killed_run_with_a_teacher_resumes_bit_for_bit(taught, tmp_path):
    assert not [*taught.glob("checkpoints/*/weights-*")]
    stopped = cut_to(taught, 2, tmp_path)
    assert differing(go_on(stopped).run, leaves(taught, exact=True)) == []


def replace_weights(teacher: Path) -> None:
    shutil.rmtree(teacher)
    save_tiny(teacher, **{**LARGER, "seed": 4})


def change_config(teacher: Path) -> None:
    config = json.loads((teacher / "config.json").read_text(encoding="utf-8"))
    changed = json.dumps(config | {"rms_norm_eps": 0.5})
    (teacher / "config.json").write_text(changed, encoding="utf-8")


@pytest.mark.parametrize("change", [replace_weights, change_config])
def test_resume_with_another_teacher_at_its_path_is_rejected(model, tmp_path, change):
    folder = save_tiny(tmp_path / "teacher", **LARGER)
    run = train(settings_of(model, tmp_path, loss={"reference": str(folder)})).run
    change(folder)
    with pytest.raises(SettingsError, match=r"loss\.reference"):
        go_on(run, schedule={"batches": 5})


@pytest.fixture(scope="module")
def alone(model, teacher, tmp_path_factory):
    """The float32 run of one process with a teacher."""
    root = tmp_path_factory.mktemp("alone")
    loss = {"reference": str(teacher), "reference_prompt": BEST}
    task = {"name": "sample_task:load_rarely_right"}
    return cache(lambda: train(settings_of(model, root, loss=loss, task=task)).run)


def test_groups_without_a_right_completion_have_no_hint_and_replay(alone):
    rows = load_rollouts(alone())
    rewards = defaultdict(list)
    for row in rows:
        rewards[row["step"], row["prompt_id"]].append(row["reward"])
    has_best = [max(rewards[row["step"], row["prompt_id"]]) > 0 for row in rows]
    is_hinted = [row["ref_prompt_token_ids"] != row["prompt_token_ids"] for row in rows]
    assert is_hinted == has_best
    assert len(set(has_best)) == 2
    assert verify_run(alone(), 4, trust_run_code=True).differences == []


@pytest.mark.parametrize("shard", ["zero1", "fsdp2"])
def test_ranks_with_a_teacher_make_the_run_of_one_process(model, teacher, alone, tmp_path, shard):
    loss = {"reference": str(teacher), "reference_prompt": BEST}
    task = {"name": "sample_task:load_rarely_right"}
    settings = settings_of(model, tmp_path, loss=loss, task=task, **sharded(shard))
    run = only_result(together(2, settings)).run
    columns: dict[str, Any] = {"token_ids": 0.0, "ref_logprobs": 1e-4}
    for row, other in zip(load_rollouts(run), load_rollouts(alone()), strict=True):
        for column, tolerance in columns.items():
            assert row[column] == pytest.approx(other[column], abs=tolerance), column
