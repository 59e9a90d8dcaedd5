"""Judge completions in worker processes, each with a deadline.

Every completion ends in one of three outcomes (see `lagrpo.types.Outcome`). An exception, a crash, a hang or a reward
that is no finite number makes that one completion *unscored*, with its reason; its worker is replaced if need be, and
the others are judged as usual. When more than a stated share of a batch has no reward, the run stops.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lagrpo.tasks.base import Judge
from lagrpo.tasks.rewards import Answer, Rewards
from lagrpo.types import Completion, Group, Outcome, Prompt
from lagrpo.verify import worker
from lagrpo.verify.pool import Job, VerifierError, Workers
from lagrpo.verify.verdicts import Verdict

_EARLY = 64
_SPARE = 2.0  # seconds for a worker whose calls keep a deadline themselves


class Verifier:
    """Workers that judge completions.

    Args:
        judge: (text, gold) -> reward, picklable by reference; or several `Rewards`, each with calls of its own.
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
        judge: Judge | Rewards,
        *,
        workers: int | None = None,
        deadline: float = 5.0,
        memory: float = 4.0,
        file_size: float = 1.0,
        max_without_reward: float = 0.5,
    ) -> None:
        self.max_without_reward = max_without_reward
        self._deadline = deadline
        self._rewards = judge.of if isinstance(judge, Rewards) else ()
        self._combine = judge.combine if isinstance(judge, Rewards) else _only
        self._workers = Workers(judge, "judge", workers, deadline, memory, file_size)

    def judge(self, groups: Iterable[Group]) -> Iterator[Group]:
        """The groups with the outcome of every completion, in the order given.

        Completions are judged while `groups` goes on yielding, and a group is yielded as soon as it and those before it
        are done. A completion that has an outcome already (it failed) keeps it.

        Raises VerifierError where no worker can judge, and where more than `max_without_reward` of the completions got
        no reward (after every group was yielded, or earlier, once 64 completions have an outcome)."""
        pending: deque[tuple[Group, list[_Asked]]] = deque()
        tally = Tally()
        try:
            for group in groups:
                pending.append((group, self._submit(group)))
                while pending and all(asked.job.done() for asked in pending[0][1]):
                    yield self._collect(*pending.popleft(), tally)
            while pending:
                yield self._collect(*pending.popleft(), tally)
        finally:
            for asked in (asked for _, all_asked in pending for asked in all_asked):
                self._workers.forget(asked.job)
        if message := describe_excess(tally, self.max_without_reward):
            raise VerifierError(message)

    def close(self) -> None:
        """End the workers, whatever they are doing, within seconds."""
        self._workers.close()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, group: Group) -> list[_Asked]:
        """Ask the workers about each completion of a group that has no outcome yet: the judge, or one reward after the
        other."""
        places = [n for n, completion in enumerate(group.completions) if completion.outcome is None]
        if self._rewards:
            numbers = range(len(self._rewards) if places else 0)
            return [asked for number in numbers for asked in self._submit_to(number, group, places)]
        texts, gold = [completion.text for completion in group.completions], group.prompt.gold
        return [_Asked((n,), self._workers.submit(worker.give_verdict, texts[n], gold)) for n in places]

    def _submit_to(self, number: int, group: Group, places: Sequence[int]) -> Iterator[_Asked]:
        """Ask a reward about these completions: about all at once where it takes whole groups."""
        reward = self._rewards[number]
        seconds, spare = reward.deadline or self._deadline, _SPARE if reward.waits else 0.0
        call = partial(worker.give_verdicts, seconds)
        for own in [places] if reward.whole_groups else [[n] for n in places]:
            answers = [_answer(group.prompt, group.completions[n], reward.takes == "answer") for n in own]
            yield _Asked(tuple(own), self._workers.submit(call, number, answers, seconds=seconds, spare=spare))

    def _collect(self, group: Group, all_asked: list[_Asked], tally: Tally) -> Group:
        """Wait for the outcomes of the group, and return it with them."""
        found: dict[int, list[Outcome]] = {}
        for asked in all_asked:
            outcomes = _read(self._workers.result(asked.job), len(asked.places))
            for n, outcome in zip(asked.places, outcomes, strict=True):
                found.setdefault(n, []).append(outcome)
        completions = [
            replace(c, outcome=self._combine(found[n])) if n in found else c for n, c in enumerate(group.completions)
        ]
        judged = replace(group, completions=tuple(completions))
        tally.add(judged)
        if tally.completions >= _EARLY and (message := describe_excess(tally, self.max_without_reward)):
            raise VerifierError(message)
        return judged


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call under way, and which completions of their group it is about."""

    places: tuple[int, ...]
    job: Job


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


def _answer(prompt: Prompt, completion: Completion, with_messages: bool) -> Answer:
    messages = prompt.messages if with_messages else ()
    return Answer(completion.text, prompt.gold, messages, completion.length, completion.finished)


def _only(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome that a single judge gives."""
    return outcomes[0]


def _read(verdict: Verdict, count: int) -> list[Outcome]:
    """The outcomes of so many completions: one verdict can hold for all."""
    kind, value = verdict
    return [_outcome(*each) for each in (value if kind == "several" else [verdict] * count)]


def _outcome(kind: str, value: float | str) -> Outcome:
    return Outcome.scored(float(value)) if kind == "scored" else Outcome.unscored(str(value))
