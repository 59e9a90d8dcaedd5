"""A model of 132,416 parameters that knows sums and errs, for studies with many runs: experiments/small.

    python experiments/small_model.py

Writes model, sums/train.jsonl, sums/test.jsonl, and one-token.jsonl there. The data come out the same everywhere, the
weights up to rounding, so the weights are kept in the repository. Five minutes of a core of a Zen 3 beside other work.

The model imitates a teacher that adds three digits ("3+8+5=" is followed by "16.") and is right less often the more of
them are 5 or more: RIGHT, which the model follows to within .1. The teacher's errors are off by 1, 2 or 10. So the
model has the right answer to offer on nearly every prompt, on the hardest not as its likeliest, and its rate of success
varies over prompts as a language model's does.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lagrpo.runs.files import write_atomically

FOLDER = Path(__file__).resolve().parent / "small"
RIGHT = (0.5, 0.35, 0.2, 0.1)
"""The teacher's rate of success on sums in which 0, 1, 2, 3 digits are 5 or more."""
ERRORS = (-10, -2, -1, 1, 2, 10)
VOCABULARY = "0123456789+=._#?"  # "." ends an answer, "_" is padding, "?" stands for anything else, "#" is not used
END, PADDING = VOCABULARY.index("."), VOCABULARY.index("_")
TESTED, ONE_TOKEN = 200, 16  # sums
UPDATES, BATCH, LR = 3000, 256, 3e-3

Sum = tuple[int, int, int]


def rate(digits: Sum) -> float:
    """The teacher's rate of success.

    >>> rate((3, 8, 5)), rate((0, 1, 2))
    (0.2, 0.5)
    """
    return RIGHT[sum(digit >= 5 for digit in digits)]


def split() -> tuple[list[Sum], list[Sum]]:
    """The 1,000 sums: 800 for training, 200 for testing."""
    sums: list[Sum] = [(a, b, c) for a, b, c in product(range(10), repeat=3)]
    random.Random(0).shuffle(sums)
    return sums[TESTED:], sums[:TESTED]


def one_token(sums: list[Sum]) -> list[Sum]:
    """The first sums whose answer is one token: half of them hard, with a digit of 5 or more, half of them easy."""
    below_ten = [digits for digits in sums if sum(digits) < 10]
    hard = [digits for digits in below_ten if max(digits) >= 5]
    easy = [digits for digits in below_ten if max(digits) < 5]
    return hard[: ONE_TOKEN // 2] + easy[: ONE_TOKEN // 2]


def line(digits: Sum) -> str:
    """
    >>> line((3, 8, 5))
    '{"prompt": "3+8+5=", "answer": "16"}'
    """
    return json.dumps({"prompt": f"{'+'.join(map(str, digits))}=", "answer": str(sum(digits))})


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character; the chat template is the question and nothing else."""
    characters = Tokenizer(
        models.WordLevel({c: n for n, c in enumerate(VOCABULARY)}, unk_token="?")
    )
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=".", pad_token="_", unk_token="?"
    )
    fast.chat_template = "{{ messages[-1].content }}"
    return fast


def lesson(draws: random.Random) -> list[int]:
    """Token ids of a sum with the teacher's answer, padded to 9."""
    digits = (draws.randrange(10), draws.randrange(10), draws.randrange(10))
    right = draws.random() < rate(digits)
    answer = sum(digits) if right else max(0, sum(digits) + draws.choice(ERRORS))
    return [VOCABULARY.index(c) for c in f"{'+'.join(map(str, digits))}={answer}.".ljust(9, "_")]


def loss_of(model: Any, ids_BT: Tensor) -> Tensor:
    """Mean cross-entropy of the answers' tokens, nats."""
    labels_BT = ids_BT.masked_fill(ids_BT == PADDING, -100)
    labels_BT[:, :6] = -100  # the question
    return model(input_ids=ids_BT, labels=labels_BT).loss


def train() -> LlamaForCausalLM:
    """The model that imitates the teacher."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PADDING,
    )
    model, draws = LlamaForCausalLM(config), random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LR, total_steps=UPDATES, pct_start=0.05
    )
    for update in range(UPDATES):
        loss = loss_of(model, torch.tensor([lesson(draws) for _ in range(BATCH)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if update % 250 == 249:
            print(f"update {update + 1}: {float(loss.detach()):.3f} nats a token", flush=True)
    return model


def main() -> None:
    training, testing = split()
    parts = {"sums/train": training, "sums/test": testing, "one-token": one_token(training)}
    for name, sums in parts.items():
        write_atomically(
            FOLDER / f"{name}.jsonl", "".join(f"{line(digits)}\n" for digits in sums).encode()
        )
    tokenizer().save_pretrained(FOLDER / "model")
    train().save_pretrained(FOLDER / "model")


if __name__ == "__main__":
    main()
