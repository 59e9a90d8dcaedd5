"""What a tracker has of a run: trackers/NAME.json in the run's directory.

It is written before a point is sent. A process that is killed between the two loses that point; no point is ever sent
twice, and no resumed run sends again what the tracker has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from lagrpo.runs.files import write_atomically
from lagrpo.untrusted import parse_json, read_text


@dataclass(slots=True)
class Standing:
    """What one tracker has."""

    file: Path
    run: str
    """name of the run's directory: a copy under another name is another run"""
    id: str | None = None
    """of the run there"""
    batch: int = 0
    """the last batch whose metrics it has"""
    evaluations: set[str] = field(default_factory=set)
    """as `moment` names them"""

    @staticmethod
    def read(run: Path, tracker: str) -> Standing:
        """As the file of the run says; new where there is none. Raises ValueError for a damaged one."""
        file = run / "trackers" / f"{tracker}.json"
        new = Standing(file, run.name)
        if not file.exists():
            return new
        try:
            found = parse_json(read_text(file))
            of, id, batch, evaluations = (found[name] for name in ("run", "id", "batch", "evaluations"))
            if not (isinstance(id, str) and isinstance(batch, int) and isinstance(evaluations, list)):
                raise ValueError("other types than a run writes")
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(f"{file} is damaged ({error}); remove it, and all is sent anew") from error
        return Standing(file, run.name, id, batch, set(map(str, evaluations))) if of == run.name else new

    def opened(self, id: str) -> None:
        """The tracker's run is `id`; one other than before has nothing yet."""
        if id != self.id:
            self.id, self.batch, self.evaluations = id, 0, set()
        self.write()

    def write(self) -> None:
        said = {"run": self.run, "id": self.id, "batch": self.batch, "evaluations": sorted(self.evaluations)}
        write_atomically(self.file, json.dumps(said, indent=1) + "\n")


def moment(evaluation: str, batch: int) -> str:
    """An evaluation by when it was made. The one after the last batch gets another name when the run gets more batches.

    >>> moment("after", 40), moment("batch-000040", 40), moment("before", 0)
    ('batch-000040', 'batch-000040', 'before')
    """
    return evaluation.replace("after", f"batch-{batch:06d}")
