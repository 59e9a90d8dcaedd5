"""The texts of token ids, by the tokenizer of a run's model if that is on this machine. No network is asked.

Only tokenizer.json is read. It is looked for beside the weights that the run wrote, in the model's directory, among the
converted models of lagrpo and in the cache of the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lagrpo.cache import cache_directory

FILE = "tokenizer.json"
PROBED = 50  # completions whose text is compared


def texts_of(
    run: Path, config: Mapping[str, Any], ids: np.ndarray, rows: Mapping[str, Any]
) -> tuple[list[str] | None, str]:
    """The text of each token id and "", or None and why there are none."""
    tokenizer = load_tokenizer(run, str(config.get("model", {}).get("path", "")))
    if tokenizer is None:
        return None, "the tokenizer of the run's model is not on this machine, so tokens are shown by their ids"
    lengths = rows["length"][:PROBED]
    probed = [rows["token_ids"][end - n : end].tolist() for end, n in zip(np.cumsum(lengths), lengths, strict=True)]
    if not fits(tokenizer, probed, rows["completion"][: len(probed)]):
        return None, "the tokenizer found for the run's model gives other texts, so tokens are shown by their ids"
    return token_texts(tokenizer, ids.tolist()), ""


def load_tokenizer(run: Path, model: str) -> Any | None:
    """The tokenizer (of the package tokenizers) of a run whose model.path is `model`; None if none can be read."""
    from tokenizers import Tokenizer

    for path in _places(run, model):
        try:
            return Tokenizer.from_str(path.read_text("utf-8"))
        except Exception:  # noqa: BLE001 - the package raises Exception itself
            continue
    return None


def _places(run: Path, model: str) -> Iterator[Path]:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from lagrpo.model.embedded import ALIASES, DIRECTORY

    yield from sorted((run / "weights").glob(f"*/{FILE}"))
    if model in ALIASES:
        yield cache_directory() / DIRECTORY / FILE
    elif model:
        yield Path(model).expanduser() / FILE
        try:
            yield Path(str(try_to_load_from_cache(model, FILE)))
        except (HFValidationError, ValueError):  # a path, not a hub id
            return


def fits(tokenizer: Any, ids: Sequence[Sequence[int]], texts: Sequence[str]) -> bool:
    """Whether the tokenizer gives the texts of completions, up to white space, from their ids."""
    pairs = zip(ids, texts, strict=True)
    return all("".join(tokenizer.decode(list(row)).split()) == "".join(text.split()) for row, text in pairs)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each id inside of a text. A part of a character is shown as its name in the vocabulary.

    A token is decoded behind another one, since decoders drop the space before the first."""
    anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    before = tokenizer.decode(anchor, skip_special_tokens=False)
    found = []
    for number in map(int, ids):
        text = tokenizer.decode([*anchor, number], skip_special_tokens=False)
        own = text[len(before) :] if text.startswith(before) else ""
        own = own or tokenizer.decode([number], skip_special_tokens=False)
        found.append(own if own and "\ufffd" not in own else f"<{tokenizer.id_to_token(number) or number}>")
    return found
