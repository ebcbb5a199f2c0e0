"""What a run has shown. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.chaos.answers import Answers
from benchmarks.chaos.flatness import Growth, Sample
from benchmarks.chaos.ledger import Execution, Receipt
from benchmarks.chaos.outbox import Submission
from benchmarks.chaos.recovery import Recovery

#: Cases of a kind that a verdict describes; the counts tell how many there were.
MAX_EXAMPLES = 4


@dataclass(slots=True)
class Verdict:
    """The end of a run: five counts that must be 0, and what they rest on."""

    transport: str
    seed: int
    seconds: float
    #: How often each kind of fault was done.
    faults: Mapping[str, int]
    #: Jobs whose arrival Redis has confirmed.
    submitted: int = 0
    answered: int = 0
    #: Items that were given to a task, and how many of these had been given before.
    executions: int = 0
    repeated: int = 0
    #: Not answered by the deadline, and no key in Redis has the job's message.
    lost: int = 0
    #: Not answered by the deadline, and its message is still in Redis.
    stuck: int = 0
    #: Results that were different later.
    doubled: int = 0
    #: Callbacks, steps of chains and bodies of chords that batch tasks sent more than once.
    doubled_callbacks: int = 0
    #: Answers that are not what the job's function gives.
    wrong: int = 0
    #: Workers that ended without being told to.
    ended: int = 0
    #: From the loss of a worker until all its jobs were elsewhere, where nothing else went wrong
    #: meanwhile; and wherever.
    longest_recovery_s: float = 0.0
    longest_troubled_recovery_s: float = 0.0
    #: Jobs per second that the workers did of a heap, before anything went wrong; 0 if not asked.
    capacity_per_s: float = 0.0
    #: Keys in Redis that belong to no family that is known.
    unknown_keys: list[str] = field(default_factory=list)
    #: Of memory, descriptors and keys, and how often the exporter did not answer.
    growth: list[Growth] = field(default_factory=list)
    failed_scrapes: int = 0
    samples: list[Sample] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, doubled, wrong or stuck, and nothing has grown."""
        found = (self.lost, self.stuck, self.doubled, self.doubled_callbacks, self.wrong)
        return not any((*found, *self.unknown_keys, *self.grown))

    @property
    def grown(self) -> list[Growth]:
        """What has grown although the load was the same."""
        return [each for each in self.growth if not each.is_flat]

    @property
    def info(self) -> dict[str, Any]:
        """The verdict for programs."""
        figures = {name for sample in self.samples for name in sample.figures}
        samples = {
            "at_s": [sample.at_s for sample in self.samples],
            **{name: [each.figures.get(name) for each in self.samples] for name in sorted(figures)},
        }
        info = {name: value for name, value in asdict(self).items() if name != "samples"}
        return {**info, "samples": samples, "is_good": self.is_good}

    @property
    def text(self) -> str:
        """The verdict for people."""
        faults = ", ".join(f"{count} {name}" for name, count in self.faults.items() if count)
        again = f"items executed {self.executions}, of these again {self.repeated}"
        bad = f"lost {self.lost}, stuck {self.stuck}, wrong {self.wrong}"
        double = f"doubled results {self.doubled}, doubled callbacks {self.doubled_callbacks}"
        longest = f"longest recovery {self.longest_recovery_s:.1f} s"
        troubled = f"among other faults {self.longest_troubled_recovery_s:.1f} s"
        lines = [
            f"{self.transport} transport, seed {self.seed}, {self.seconds:.0f} s: {faults}",
            f"submitted {self.submitted}, answered {self.answered}, {again}",
            f"{bad}, {double}",
            f"{longest}, {troubled}; workers that ended by themselves {self.ended}",
            *self.examples,
            *(f"of no known family: {key!r:.100}" for key in self.unknown_keys),
            *(f"grown: {each.figure}: {each.early:g} to {each.late:g}" for each in self.grown),
            "good" if self.is_good else "NOT GOOD",
        ]
        return "\n".join(lines)

    def judge(
        self,
        submissions: Sequence[Submission],
        answers: Answers,
        is_in_redis: Callable[[str], bool],
    ) -> None:
        """Compares what was submitted with what was answered."""
        self.submitted = len(submissions)
        self.doubled = len(answers.changed)
        for task_id, payload in answers.changed.items():
            self._example(f"doubled: {task_id}", answers.first[task_id].payload, payload)
        for submission in submissions:
            self._judge_one(submission, answers, is_in_redis)

    def count(
        self,
        submissions: Sequence[Submission],
        receipts: Sequence[Receipt],
        executions: Sequence[Execution],
    ) -> None:
        """Counts what was done more than once."""
        times = Counter((each.job, each.value) for each in executions)
        self.executions = len(executions)
        self.repeated = len(executions) - len(times)
        once = frozenset[str]().union(*(each.sent_once for each in submissions))
        tags: dict[str, set[str]] = defaultdict(set)
        for receipt in receipts:
            if receipt.task_id in once:
                tags[receipt.task_id].add(receipt.tag)
        for task_id, different in tags.items():
            if len(different) > 1:
                self.doubled_callbacks += 1
                self._example(f"doubled callback: {task_id}", *different)

    def follow(self, recoveries: list[Recovery]) -> None:
        """Takes the recoveries."""
        self.recoveries = recoveries
        self.longest_recovery_s = max(
            (each.seconds for each in recoveries if each.is_calm), default=0
        )
        self.longest_troubled_recovery_s = max(
            (each.seconds for each in recoveries if not each.is_calm), default=0
        )

    def _judge_one(
        self, submission: Submission, answers: Answers, is_in_redis: Callable[[str], bool]
    ) -> None:
        order = submission.order
        answer = answers.first.get(submission.task_ids[-1])
        if answer is None:
            missing = next(each for each in submission.task_ids if each not in answers.first)
            if is_in_redis(missing):
                self.stuck += 1
                self._example(f"stuck: {order.kind} {missing}")
            else:
                self.lost += 1
                self._example(f"lost: {order.kind} {missing}")
            return
        self.answered += 1
        if answer.state != "SUCCESS" or answer.result != order.expected:
            self.wrong += 1
            self._example(f"wrong: {order.kind} {submission.task_ids[-1]}", answer.payload)

    def _example(self, what: str, *details: object) -> None:
        kind = what.partition(":")[0]
        if sum(each.startswith(f"{kind}:") for each in self.examples) < MAX_EXAMPLES:
            self.examples.append(" ".join([what, *(f"{detail!s:.300}" for detail in details)]))
