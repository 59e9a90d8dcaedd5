"""Chat: from messages to token ids and back, by a model's tokenizer and chat template.

Chat templates come with models and are strangers' programs: they may loop forever or take all memory. So a process of
its own renders them (rendering.py), with a deadline, a limit of processor time and, on Linux, a limit of memory (macOS
enforces none). The process runs transformers' function, so the text is what tokenizer.apply_chat_template returns.
"""

from __future__ import annotations

import json
import multiprocessing
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lagrpo.model import rendering
from lagrpo.types import Prompt
from lagrpo.workers import ENDING, Process, killing

DEADLINE = 10.0  # seconds for one prompt
MEMORY = 512 * 2**20  # bytes beyond what the process has when it begins
START = 120.0  # seconds until the process must be ready, on a busy machine
Tools = Sequence[Mapping[str, Any]]
_LARGEST_REPLY = 16 * rendering.LONGEST  # bytes: JSON escapes a character by at most twelve


class TemplateError(ValueError):
    """A chat template fails on some messages; `reason` is one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the chat template cannot render it: {reason}")


class Templates:
    """The rendering process, from the first use or `start` to `close`, the end of this object or of the program."""

    def __init__(self, deadline: float | None = None) -> None:
        self._seconds = DEADLINE if deadline is None else deadline
        self._process: tuple[Process, Connection] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process now, so that it gets ready in the background."""
        if self._process is not None:
            return
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = Process(target=rendering.serve, args=(theirs, MEMORY, self._seconds), daemon=True)
        process.start()
        theirs.close()
        self._process, self._ready = (process, ours), False
        self._end = weakref.finalize(self, _end_process, process, ours)

    def render(self, template: str, special: Mapping[str, Any], messages: Sequence[Any]) -> str:
        """The text of the messages with the header of the coming answer; `special` holds the special tokens that the
        template may name. Raises TemplateError for an error in the template, or no text within the limits; the next
        call starts anew."""
        try:
            self.start()
            if not self._ready:
                self._ask(START)
                self._ready = True
            reply = self._ask(self._seconds, (template, dict(special), list(messages)))
        except BaseException:
            self.close()
            raise
        if "error" in reply:
            raise TemplateError(reply["error"])
        return reply["text"]

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process = None
            self._end()

    def _ask(self, seconds: float, *request: Any) -> dict[str, str]:
        """Send a request, if one is given, and return the next reply. A process that reads or writes half of one is
        ended ENDING seconds after it should have replied."""
        assert self._process is not None
        process, connection = self._process
        try:
            with killing(process.kill, seconds + ENDING):
                for what in request:
                    connection.send(what)
                if not connection.poll(seconds):
                    raise TemplateError(f"no text within {seconds:g} s")
                return json.loads(connection.recv_bytes(_LARGEST_REPLY))
        except (EOFError, OSError) as error:
            process.join(ENDING)
            raise TemplateError(f"the process that renders ended with exit code {process.exitcode}") from error


def _end_process(process: Process, connection: Connection) -> None:
    process.kill()
    process.join(ENDING)
    connection.close()


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """A tokenizer, the model's `vocabulary` in tokens, and every id that ends a completion. `templates` renders the
    tokenizer's chat template, with `arguments` beside the messages (enable_thinking, say); its giver closes it."""

    tokenizer: Any
    vocabulary: int
    eos_ids: frozenset[int]
    templates: Templates = field(default_factory=Templates)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(lm: Any, tokenizer: Any, templates: Templates | None = None) -> Chat:
        """The chat of a model of transformers. Its generation config and its tokenizer say what ends a completion."""
        ends = lm.generation_config.eos_token_id
        ids = {*(ends if isinstance(ends, list | tuple) else [ends]), getattr(tokenizer, "eos_token_id", None)}
        known = frozenset(int(i) for i in ids if i is not None)
        return Chat(tokenizer, lm.get_output_embeddings().weight.shape[0], known, templates or Templates())

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)

    def tokenize(self, prompt: Prompt, tools: Tools | None = None) -> Prompt:
        """The prompt with its token ids: through the chat template, which also tells of `tools` that it gets as JSON
        schemas, or its plain text where the tokenizer has none. Raises TemplateError where the chat template makes no
        text of it, ValueError for no tokens, or one that the model does not have."""
        if self.tokenizer.chat_template is None:
            ids = self.encode(text := "\n".join(message.get("content") or "" for message in prompt.messages))
        else:
            ids = self.encode(text := self.render(prompt.messages, tools), add_special_tokens=False)
        if not ids:
            raise ValueError(f"it has no token: it is the text {text!r:.80}")
        self.check_vocabulary(ids)
        return replace(prompt, token_ids=tuple(int(i) for i in ids))

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> str:
        """The text that the chat template makes of messages, with the header of the coming answer. Raises TemplateError
        where it makes none."""
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        variables = {**self.tokenizer.special_tokens_map, **self.arguments, **({"tools": list(tools)} if tools else {})}
        return self.templates.render(self.tokenizer.get_chat_template(), variables, given)

    def check_vocabulary(self, ids: Sequence[int]) -> None:
        """Raise ValueError for a token that the model does not have."""
        if (largest := max(ids)) >= self.vocabulary:
            raise ValueError(f"token {largest} is outside the model's vocabulary of {self.vocabulary}")

    def encode(self, text: str, **options: Any) -> list[int]:
        """The token ids of a text. Raises ValueError for half of a surrogate pair, which no tokenizer takes."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"{text[error.start]!r}, half of a surrogate pair"
            raise ValueError(f"its character {error.start} is {half}, which no tokenizer takes") from error
        return self.tokenizer(text, **options)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
