"""The texts of token ids, by the tokenizer of a run's model, where that is on this machine. No network is asked.

Only tokenizer.json is read. It is looked for beside the weights that the run wrote, in the model's directory, among the
converted models of lagrpo and in the cache of the Hugging Face hub.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lagrpo.cache import cache_directory
from lagrpo.untrusted import read_text

FILE = "tokenizer.json"
PROBED = 50  # completions whose text is compared


def load_tokenizer(run: Path, model: str) -> Any | None:
    """The tokenizer (of the package tokenizers) of a run whose model.path is `model`; None where none can be read."""
    for path in _places(run, model):
        if path.is_file() and (tokenizer := _load(path, path.stat().st_mtime_ns)) is not None:
            return tokenizer
    return None


def _places(run: Path, model: str) -> Iterator[Path]:
    yield from sorted((run / "weights").glob(f"*/{FILE}"))
    if not model:
        return
    from lagrpo.model.embedded import ALIASES, DIRECTORY

    if model in ALIASES:
        yield cache_directory() / DIRECTORY / FILE
        return
    yield Path(model).expanduser() / FILE
    if cached := _in_hub_cache(model):
        yield Path(cached)


def _in_hub_cache(model: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, FILE)
    except (HFValidationError, ValueError):  # a path, and no hub id
        return None
    return found if isinstance(found, str) else None


@functools.lru_cache(maxsize=4)
def _load(path: Path, _written: int) -> Any | None:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(read_text(path))
    except Exception:  # noqa: BLE001 - the package raises Exception itself; token ids are shown instead
        return None


def fits(tokenizer: Any, ids: Sequence[Sequence[int]], texts: Sequence[str]) -> bool:
    """Whether the tokenizer gives the texts of completions, up to white space, from their ids."""
    pairs = list(zip(ids, texts, strict=True))[:PROBED]
    return all("".join(tokenizer.decode(list(row)).split()) == "".join(text.split()) for row, text in pairs)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each id inside of a text. A part of a character is its bytes, as <0xE2 0x9C>.

    A token is decoded behind another one, since decoders drop the space before the first."""
    anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    before = tokenizer.decode(anchor, skip_special_tokens=False)
    found = tokenizer.decode_batch([[*anchor, int(number)] for number in ids], skip_special_tokens=False)
    return [_own(tokenizer, int(number), before, text) for number, text in zip(ids, found, strict=True)]


def _own(tokenizer: Any, number: int, before: str, text: str) -> str:
    own = text[len(before) :] if text.startswith(before) else tokenizer.decode([number], skip_special_tokens=False)
    if own and "\ufffd" not in own:
        return own
    name = tokenizer.id_to_token(number)
    return f"<{number}>" if name is None else _bytes_of(name)


def _bytes_of(name: str) -> str:
    """The bytes of a token of byte-level BPE, whose names have a letter for each byte; other names as they are."""
    codes = [_letters().get(letter) for letter in name]
    known = [code for code in codes if code is not None]
    return name if len(known) < len(codes) else f"<{' '.join(f'0x{code:02X}' for code in known)}>"


@functools.cache
def _letters() -> dict[str, int]:
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [code for code in range(256) if code not in plain]
    return {chr(code): code for code in plain} | {chr(256 + n): code for n, code in enumerate(others)}
