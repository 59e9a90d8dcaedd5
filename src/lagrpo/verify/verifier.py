"""Judge completions in worker processes, each with a deadline.

Every completion ends in one of three outcomes (see `lagrpo.types.Outcome`). An exception, a crash, a hang or a reward
that is no finite number makes that one completion *unscored*, with its reason; its worker is replaced if need be, and
the others are judged as usual. When more than a stated share of a batch has no reward, the run stops.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from lagrpo.tasks.base import Judge
from lagrpo.types import Completion, Group, Outcome
from lagrpo.verify import worker
from lagrpo.verify.pool import Job, VerifierError, Workers

_EARLY = 64


class Verifier:
    """Workers that judge completions.

    Args:
        judge: (text, gold) -> reward, picklable by reference.
        workers: number of processes; by default the number of CPUs at hand, at most 4.
        deadline: seconds for one completion.
        memory: GiB that a process may take with everything that it starts (on Linux).
        file_size: GiB that a process may write into one file.
        max_without_reward: largest share of a batch's completions without a reward (unscored or failed).

    The processes start in the background at once, and run until `close` or the end of the `with` block. Raises
    TypeError for a judge that cannot be sent to another process.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        workers: int | None = None,
        deadline: float = 5.0,
        memory: float = 4.0,
        file_size: float = 1.0,
        max_without_reward: float = 0.5,
    ) -> None:
        self.max_without_reward = max_without_reward
        self._workers = Workers(judge, "judge", workers, deadline, memory, file_size)

    def judge(self, groups: Iterable[Group]) -> Iterator[Group]:
        """The groups with the outcome of every completion, in the order given.

        Completions are judged while `groups` goes on yielding, and a group is yielded as soon as it and those before it
        are done. A completion that has an outcome already (it failed) keeps it.

        Raises VerifierError where no worker can judge, and where more than `max_without_reward` of the completions got
        no reward (after every group was yielded, or earlier, once 64 completions have an outcome)."""
        pending: deque[tuple[Group, list[Job | None]]] = deque()
        tally = Tally()
        try:
            for group in groups:
                pending.append((group, [self._submit(group, completion) for completion in group.completions]))
                while pending and all(job is None or job.done() for job in pending[0][1]):
                    yield self._collect(*pending.popleft(), tally)
            while pending:
                yield self._collect(*pending.popleft(), tally)
        finally:
            for job in (job for _, jobs in pending for job in jobs if job is not None):
                self._workers.forget(job)
        if message := describe_excess(tally, self.max_without_reward):
            raise VerifierError(message)

    def close(self) -> None:
        """End the workers, whatever they are doing, within seconds."""
        self._workers.close()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, group: Group, completion: Completion) -> Job | None:
        """Send a completion to the workers; None for one that has its outcome."""
        if completion.outcome is not None:
            return None
        return self._workers.submit(worker.give_verdict, completion.text, group.prompt.gold)

    def _collect(self, group: Group, jobs: list[Job | None], tally: Tally) -> Group:
        """Wait for the outcomes of the group, and return it with them."""
        pairs = zip(group.completions, jobs, strict=True)
        completions = tuple(replace(c, outcome=self._outcome(job)) if job is not None else c for c, job in pairs)
        judged = replace(group, completions=completions)
        tally.add(judged)
        if tally.completions >= _EARLY and (message := describe_excess(tally, self.max_without_reward)):
            raise VerifierError(message)
        return judged

    def _outcome(self, job: Job) -> Outcome:
        kind, value = self._workers.result(job)
        return Outcome.scored(float(value)) if kind == "scored" else Outcome.unscored(str(value))


@dataclass(slots=True)
class Tally:
    """Counts the judged completions and the reasons for missing rewards, with an example for each reason."""

    completions: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, group: Group) -> None:
        self.completions += len(group.completions)
        for completion in group.completions:
            if (outcome := completion.outcome) is not None and outcome.kind != "scored":
                reason = f"{outcome.kind}: {outcome.reason}"
                self.reasons[reason] += 1
                self.examples.setdefault(reason, f"{completion.text!r:.200}, judged against {group.prompt.gold!r:.100}")


def describe_excess(tally: Tally, max_share: float) -> str | None:
    """The message for the user when more than `max_share` of the completions have no reward; None for fewer.

    >>> describe_excess(Tally(8, Counter({"unscored: no verdict within 5 s": 2})), max_share=0.25) is None
    True
    """
    without_reward, most_common = tally.reasons.total(), tally.reasons.most_common(5)
    if without_reward <= max_share * tally.completions:
        return None
    counts = "\n".join(f"  {count} x {reason}" for reason, count in most_common)
    return (
        f"{without_reward} of {tally.completions} completions have no reward, which is more than the allowed share of "
        f"{max_share:g} (verifier.max_without_reward):\n{counts}\nThe first of the most common kind: "
        f"{tally.examples.get(most_common[0][0], 'not kept')}"
    )
