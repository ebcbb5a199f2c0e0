"""What goes wrong, and when: the same for the same plan, whatever the machine does. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from benchmarks.chaos.plan import Plan


class Action(StrEnum):
    """One thing that is done to the system."""

    KILL_WORKER = "kill worker"
    KILL_DEVICE = "kill device"
    KILL_CHILD = "kill child"
    STOP_WORKER = "stop worker"
    CONTINUE_WORKER = "continue worker"
    SCALE = "scale"
    REDIS_DOWN = "kill redis"
    REDIS_UP = "start redis"
    CUT = "cut connections"
    FILL = "fill redis"
    FREE = "free redis"
    FAIL_OVER = "fail over"
    FOLLOW = "follow"
    MOVE_SLOT = "move slot"
    BROKER_DOWN = "kill broker"
    BROKER_UP = "start broker"
    MALFORMED = "malformed message"


#: What may delay the recovery of another worker's jobs: those who would notice are hit, too.
DISTURBING = frozenset(
    {
        Action.KILL_WORKER,
        Action.STOP_WORKER,
        Action.REDIS_DOWN,
        Action.REDIS_UP,
        Action.CUT,
        Action.FILL,
        Action.FREE,
        Action.FAIL_OVER,
        Action.FOLLOW,
        Action.MOVE_SLOT,
        Action.BROKER_DOWN,
        Action.BROKER_UP,
    }
)


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """One action and its time."""

    at_s: float
    action: Action
    #: Chooses among the processes that there are by then; from 0 to below 1.
    pick: float = 0.0
    #: SCALE, KILL_WORKER, KILL_CHILD: how many workers there must be then. MALFORMED: which
    #: message.
    number: int = 0


#: How long a fault waits that found nothing to be done to, in seconds: something is just starting.
AGAIN_S = 0.5

#: How long after that its end comes, in seconds.
AFTER_S = 1.0


def again(event: Event) -> list[Event]:
    """What takes the place of an event that found nothing to be done to, if it is repeated.

    What ends it is repeated, too: it may have come already.
    """
    later = replace(event, at_s=event.at_s + AGAIN_S)
    match event.action:
        case Action.KILL_DEVICE | Action.FOLLOW | Action.MOVE_SLOT:
            return [later]
        case Action.REDIS_DOWN:
            return [later, Event(later.at_s + AFTER_S, Action.REDIS_UP)]
        case Action.FAIL_OVER:
            return [later, Event(later.at_s + AFTER_S, Action.FOLLOW)]
        case Action.KILL_WORKER | Action.KILL_CHILD:
            return [later, Event(later.at_s + AGAIN_S, Action.SCALE, number=event.number)]
        case _:
            return []


def schedule(plan: Plan) -> list[Event]:
    """All events of a run, by time.

    Each fault has a slot of its own, in random order within its round, and lies anywhere in it;
    what ends it may lie in another's slot, so that faults overlap.
    """
    random = Random(plan.seed)
    mix = [
        *[Action.KILL_WORKER] * plan.kills,
        *[Action.KILL_DEVICE] * plan.device_kills,
        *[Action.KILL_CHILD] * plan.child_kills,
        *[Action.STOP_WORKER] * plan.stops,
        *[Action.REDIS_DOWN] * plan.redis_restarts,
        *[Action.CUT] * plan.cuts,
        *[Action.FILL] * plan.fills,
        *[Action.FAIL_OVER] * plan.failovers,
        *[Action.MOVE_SLOT] * plan.moves,
        *[Action.BROKER_DOWN] * plan.broker_restarts,
    ]
    faults = []
    for _ in range(plan.rounds):
        random.shuffle(mix)
        faults += mix
    events = [
        event
        for slot, action in enumerate(faults, start=1)
        for event in _fault(plan, action, (slot + random.random()) * plan.gap_s, random)
    ]
    events += [
        Event(random.uniform(0, plan.duration_s), Action.MALFORMED, number=number)
        for number in range(plan.malformed * plan.rounds)
    ]
    return sorted(events)


def _fault(plan: Plan, action: Action, at_s: float, random: Random) -> Iterator[Event]:
    """A fault, and what ends it."""
    number = 0
    if action is Action.KILL_WORKER:
        number = random.randint(plan.min_workers, plan.max_workers)
    if action is Action.KILL_CHILD:
        # Where no worker with processes is left, a new one has them.
        number = plan.max_workers
    yield Event(at_s, action, random.random(), number)
    match action:
        case Action.KILL_WORKER:
            yield Event(at_s + random.uniform(0.1, 1.0), Action.SCALE, number=number)
        case Action.STOP_WORKER:
            yield Event(at_s + plan.stop_s, Action.CONTINUE_WORKER)
        case Action.REDIS_DOWN:
            yield Event(at_s + random.uniform(0.2, 1.5), Action.REDIS_UP)
        case Action.BROKER_DOWN:
            yield Event(at_s + random.uniform(0.2, 1.5), Action.BROKER_UP)
        case Action.FILL:
            # Workers end and start while there is no room.
            yield Event(at_s + 0.1, Action.SCALE, number=max(1, plan.min_workers - 1))
            yield Event(at_s + 0.2, Action.SCALE, number=plan.max_workers)
            yield Event(at_s + plan.full_s, Action.FREE)
        case Action.FAIL_OVER:
            yield Event(at_s + random.uniform(0.5, 3.0), Action.FOLLOW)
