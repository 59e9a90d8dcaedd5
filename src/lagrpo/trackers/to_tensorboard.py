"""TensorBoard: event files in the run's directory, tensorboard/. `tensorboard --logdir runs` shows all runs beside each
other. They are written with TensorBoard's own writer, without PyTorch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lagrpo.errors import visible
from lagrpo.redaction import redact
from lagrpo.runs.reading import open_run
from lagrpo.trackers.tracker import TABLE, About, Row, Status
from lagrpo.untrusted import read_text


class TensorBoard:
    """A resumed run goes on in a further event file of the same directory."""

    def open(self, about: About, known: str | None) -> str:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._runs, folder = about.run.parent, about.run / "tensorboard"
        known = known if folder.is_dir() else None
        self._writer: Any = EventFileWriter(str(folder))
        if known is None:
            config = redact(read_text(open_run(about.run).path / "config.toml"))
            self._write(0, [_text("settings", f"```toml\n{config}\n```")])
        return known or f"tensorboard-{time.time_ns()}"

    def place(self) -> str:
        return f"tensorboard --logdir {self._runs}"

    def numbers(self, batch: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        self._write(batch, [Summary.Value(tag=name, simple_value=number) for name, number in values.items()])

    def completions(self, batch: int, rows: Sequence[Row]) -> None:
        """As a table in Markdown: TensorBoard has no other."""
        if rows:
            lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(cell) for cell in row.values()] for row in rows)]
            self._write(batch, [_text(TABLE, "\n".join(f"| {' | '.join(line)} |" for line in lines))])

    def close(self, status: Status) -> None:
        self._writer.close()

    def _write(self, batch: int, values: Sequence[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        self._writer.add_event(Event(wall_time=time.time(), step=batch, summary=Summary(value=values)))
        self._writer.flush()


def _text(tag: str, text: str) -> Any:
    """A value of TensorBoard's text plugin."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.compat.proto.types_pb2 import DT_STRING  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.plugins.text.metadata import create_summary_metadata

    metadata = create_summary_metadata(display_name="", description="")
    return Summary.Value(tag=tag, metadata=metadata, tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]))


def _cell(value: Any) -> str:
    """A value in one cell of a Markdown table."""
    return "" if value is None else visible(str(value)).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
