"""The dependencies of actions and one event-driven simulator of plans; validation, lowering and timing use both.

    F(s,i)        waits for F(s-1,i)                     lowered: for the SEND_F of stage s-1 instead
    I, B(s,i)     wait for F(s,i) and I or B(s+1,i)      lowered: for the SEND_B of stage s+1 instead
    W(s,i)        waits for I(s,i)
    SEND          waits for its action and for the RECV that it meets: no order that passes needs buffered sends
    RECV          posts a receive and waits for nothing

Each rank is a list and a position. A rank advances while the actions that its next item needs have ended; otherwise it
is put aside and woken by the action that it waits for:

    start = max(end of the rank's item before, end of each needed action + latency between the ranks)

validate.py asks whether all positions reach the end, deadlocks.py where a receive must be posted earlier, timing.py
when each item starts and ends.

Proved by: tests/pipeline/test_plans.py
"""

from collections import deque
from collections.abc import Callable, Sequence

from minidist.core.pipeline.plan import COMPUTE, Action, Item, Plan, actions_of
from minidist.pipeline.updates import update_rule

Span = tuple[Item, float, float]  # item, start, end


class Dependencies:
    """What each action of a plan waits for: the only place that knows how actions depend on another."""

    def __init__(self, plan: Plan) -> None:
        self.stages = plan.stages
        self.actions = {action for rank in range(plan.ranks) for action in plan.actions(rank)}
        # Where weights change on the way, what the update before an action waits for.
        rule = update_rule(plan)
        self.updates: dict[Action, list[Action]] = rule.waits(plan) if rule and rule.waits else {}

    def needs(self, action: Action) -> list[Action]:
        """Return the actions that must have ended before `action` starts."""
        kind, stage, i = action.kind, action.stage, action.microbatch
        if kind == "F":
            found = [] if stage == 0 else [self.data("SEND_F", stage - 1, i)]
        elif kind in ("I", "B"):
            own = Action.of("F", stage, i)
            found = [own] if stage + 1 == self.stages else [own, self.data("SEND_B", stage + 1, i)]
        elif kind == "W":
            return [Action.of("I", stage, i)]
        elif kind == "RECOMPUTE":
            return [Action.of("F", stage, i)]
        elif kind.startswith("SEND"):
            return [self.produced(kind, stage, i), partner(action)]
        else:
            return []  # RECV; and REDUCE_GRAD, whose place in the order is all
        return found + self.updates.get(action, [])

    def data(self, send: str, stage: int, i: int) -> Action:
        """Return what makes the data of `stage` available: its SEND where there is one, else the computation."""
        sent = Action.of(send, stage, i)
        return sent if sent in self.actions else self.produced(send, stage, i)

    def produced(self, send: str, stage: int, i: int) -> Action:
        """Return the computation whose result a SEND sends; a backward is B, or I where the weights wait."""
        if send == "SEND_F":
            return Action.of("F", stage, i)
        whole = Action.of("B", stage, i)
        return whole if whole in self.actions else Action.of("I", stage, i)


def partner(transfer: Action) -> Action:
    """Return the RECV that meets a SEND, or the SEND that meets a RECV."""
    step = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}[transfer.kind]
    side = "RECV" if transfer.kind.startswith("SEND") else "SEND"
    return Action.of(f"{side}_{transfer.kind[-1]}", transfer.stage + step, transfer.microbatch)


class Simulation:
    """A run of `orders`: how far each rank has come, and when each action ended. `simulate` runs all that can run.

    Without `seconds` and `latency` every time is 0 and only the order counts. `orders` may be changed behind
    `position` between two calls of `run`.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Item]],
        needs: Callable[[Action], Sequence[Action]],
        seconds: Callable[[Item], float] = lambda item: 0.0,
        latency: Callable[[Action, Action], float] = lambda needed, action: 0.0,
    ) -> None:
        self.orders, self.needs, self.seconds, self.latency = orders, needs, seconds, latency
        self.position, self.clock = [0] * len(orders), [0.0] * len(orders)
        self.ends: dict[Action, float] = {}
        self.spans: list[list[Span]] = [[] for _ in orders]  # of computations
        self._waiting: dict[Action, list[int]] = {}  # action -> the ranks that it wakes
        self._awake = deque(range(len(orders)))

    @property
    def blocked(self) -> list[int]:
        """The ranks that have not reached the end of their order."""
        return [rank for rank, order in enumerate(self.orders) if self.position[rank] < len(order)]

    def missing(self, rank: int) -> tuple[Action, Action]:
        """Return the action at which a blocked rank waits, and the first action that it waits for."""
        return next(
            (action, needed)
            for action in actions_of(self.orders[rank][self.position[rank]])
            for needed in self.needs(action)
            if needed not in self.ends
        )

    def run(self) -> None:
        """Advance every rank as far as it can go."""
        self._awake.extend(rank for rank in self.blocked if rank not in self._awake)
        while self._awake:
            rank = self._awake.popleft()
            while self.advance(rank) is not None:
                pass

    def advance(self, rank: int) -> Item | None:
        """Run the next item of `rank` and return it; None when the rank is at its end or has to wait."""
        if self.position[rank] == len(self.orders[rank]):
            return None
        item = self.orders[rank][self.position[rank]]
        actions = actions_of(item)

        # An overlapped pair starts when both of its actions have what they need.
        start = self.clock[rank]
        for action in actions:
            for needed in self.needs(action):
                end = self.ends.get(needed)
                if end is None:
                    self._waiting.setdefault(needed, []).append(rank)
                    return None
                start = max(start, end + self.latency(needed, action))

        end = self.clock[rank] = start + self.seconds(item)
        self.position[rank] += 1
        if actions[0].kind in COMPUTE:
            self.spans[rank].append((item, start, end))
        for action in actions:
            self.ends[action] = end
            self._awake.extend(self._waiting.pop(action, ()))
        return item


def simulate(
    orders: Sequence[Sequence[Item]],
    needs: Callable[[Action], Sequence[Action]],
    seconds: Callable[[Item], float] = lambda item: 0.0,
    latency: Callable[[Action, Action], float] = lambda needed, action: 0.0,
) -> Simulation:
    """Run `orders` as far as they go. `blocked` of the result names the ranks that wait for ever."""
    simulation = Simulation(orders, needs, seconds, latency)
    simulation.run()
    return simulation
