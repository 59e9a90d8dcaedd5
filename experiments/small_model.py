"""Makes the model of experiments/small, which knows sums and errs, for studies with many runs.

    python experiments/small_model.py

Writes model, sums/train.jsonl, sums/test.jsonl, and one-token.jsonl there. The data come out the
same everywhere, the weights up to rounding, so the weights are kept in the repository. It takes
five minutes of a core of a Zen 3. The model has 132,416 parameters.

It imitates a teacher that adds three digits ("3+8+5=" is followed by "16."). The more of them are 5
or more, the less often the teacher is right (RIGHT, which the model follows to within .1). Its
errors are off by 1, 2 or 10. So the model has the right answer to offer on nearly every prompt, on
the hardest not as its likeliest, and its success rate varies over prompts as a language model's
does.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lagrpo.runs.files import write_atomically

FOLDER = Path(__file__).resolve().parent / "small"
RIGHT = (0.5, 0.35, 0.2, 0.1)
"""The teacher's rate of success on sums in which 0, 1, 2, 3 digits are 5 or more."""
# A wrong digit of the tens, or a slip of one or two in the ones.
ERRORS = (-10, -2, -1, 1, 2, 10)
# "." ends an answer, "_" is padding, "?" stands for anything else, "#" is not used.
VOCABULARY = "0123456789+=._#?"
END = VOCABULARY.index(".")
PADDING = VOCABULARY.index("_")
# Numbers of sums.
TESTED = 200
ONE_TOKEN = 16
UPDATES = 3000
BATCH = 256
LR = 3e-3

Sum = tuple[int, int, int]


def rate(digits: Sum) -> float:
    """The teacher's success rate.

    >>> rate((3, 8, 5)), rate((0, 1, 2))
    (0.2, 0.5)
    """
    return RIGHT[sum(digit >= 5 for digit in digits)]


def split() -> tuple[list[Sum], list[Sum]]:
    """The 1,000 sums: 800 for training, 200 for testing."""
    sums: list[Sum] = [(a, b, c) for a, b, c in product(range(10), repeat=3)]
    # Python's generator gives the same order on every machine and version.
    random.Random(0).shuffle(sums)
    return sums[TESTED:], sums[:TESTED]


def one_token(sums: list[Sum]) -> list[Sum]:
    """The first ONE_TOKEN sums whose answer is one token.

    Half of them are hard, with a digit of 5 or more, half are easy.
    """
    below_ten = [digits for digits in sums if sum(digits) < 10]
    hard = [digits for digits in below_ten if max(digits) >= 5]
    easy = [digits for digits in below_ten if max(digits) < 5]
    return hard[: ONE_TOKEN // 2] + easy[: ONE_TOKEN // 2]


def line(digits: Sum) -> str:
    """A line of the data files.

    >>> line((3, 8, 5))
    '{"prompt": "3+8+5=", "answer": "16"}'
    """
    return json.dumps({"prompt": f"{'+'.join(map(str, digits))}=", "answer": str(sum(digits))})


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each character. The chat template is the question alone."""
    token_ids = {character: index for index, character in enumerate(VOCABULARY)}
    characters = Tokenizer(models.WordLevel(token_ids, unk_token="?"))
    # An empty pattern matches between all characters.
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=".", pad_token="_", unk_token="?"
    )
    fast.chat_template = "{{ messages[-1].content }}"
    return fast


def lesson(draws: random.Random) -> list[int]:
    """Token ids of a random sum with the teacher's answer, padded to 9."""
    digits = (draws.randrange(10), draws.randrange(10), draws.randrange(10))
    answer = sum(digits)
    if draws.random() >= rate(digits):
        # The vocabulary has no minus sign.
        answer = max(0, answer + draws.choice(ERRORS))
    text = f"{'+'.join(map(str, digits))}={answer}."
    # The longest line is "9+9+9=37.": a question of 6 characters, two digits and the end.
    return [VOCABULARY.index(character) for character in text.ljust(9, "_")]


def loss_of(model: LlamaForCausalLM, ids_BT: Tensor) -> Tensor:
    """Mean cross-entropy of the answers' tokens, nats."""
    # transformers ignores labels of -100.
    labels_BT = ids_BT.masked_fill(ids_BT == PADDING, -100)
    labels_BT[:, :6] = -100  # the question
    return model(input_ids=ids_BT, labels=labels_BT).loss


def train() -> LlamaForCausalLM:
    """Trains a model to imitate the teacher."""
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
    model = LlamaForCausalLM(config)
    # Not the seed of the split: lessons are drawn from all sums, whichever part they are in.
    draws = random.Random(1)
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
        text = "".join(f"{line(digits)}\n" for digits in sums)
        write_atomically(FOLDER / f"{name}.jsonl", text.encode())
    tokenizer().save_pretrained(FOLDER / "model")
    train().save_pretrained(FOLDER / "model")


if __name__ == "__main__":
    main()
