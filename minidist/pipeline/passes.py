"""From a schedule to something that can be executed: who sends what, when receives are posted, when gradients are
complete.

    lower            1F1 → 1RECV_F1 .. 1F1 1SEND_F1      for every neighbour on another rank
    reduce_gradients .. 0B3 0REDUCE_GRAD                 directly after a stage's last B or W
    merge            0I2 0W2 → 0B2                       neighbours of one micro-batch become one action
    split            0B2 → 0I2 0W2
    recompute        0B2 → 0RECOMPUTE2 0B2               GPipe's: keep the stage's input, run its forward again
    forwards         0F0 0B0 0F1 0B1 → 0F0 0F1           evaluation

RECV *posts* a receive into a fresh buffer; the F, I or B that needs it waits. SEND does not block and is waited for at
the end of the step. A stage posts at most `prefetch` receives for each neighbour ahead of use, so its buffers can be
counted. The walk
is by event time with unit costs, and its sends block until the receive is posted: an order that passes here cannot
deadlock even where the runtime's sends are synchronous. Where only one more buffer resolves a standstill, the walk
posts one more.
"""

import heapq
from collections.abc import Iterable
from dataclasses import replace

from minidist.base.errors import UsageError
from minidist.pipeline.plan.action import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    RECOMPUTE,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    WEIGHT,
    Item,
    kind_of,
    microbatch_of,
    pack,
    parts,
    show,
    stage_of,
)
from minidist.pipeline.plan.plan import Plan


def lower(plan: Plan, prefetch: int = 1) -> Plan:
    """Sends, posted receives and gradient reductions for a plan of computations. The plan must be valid."""
    if prefetch < 1:
        raise UsageError(f"prefetch is {prefetch}; a stage must post at least 1 receive ahead")
    if plan.is_lowered:
        raise UsageError(f"plan {plan.name!r} has sends and receives already; lower a plan of computations only")
    walk = _Walk(plan, prefetch)
    return reduce_gradients(plan.with_orders(walk.run()))


class _Walk:
    """Runs the plan with unit costs and writes down what each rank does, transfers included."""

    def __init__(self, plan: Plan, prefetch: int) -> None:
        self.plan, self.prefetch = plan, prefetch
        self.backward = plan.updates != "none"
        self.home = {
            (stage_of(a), microbatch_of(a)): rank
            for rank, order in enumerate(plan.orders)
            for item in order
            for a in parts(item)
            if kind_of(a) == FORWARD
        }
        self.out: list[list[Item]] = [[] for _ in plan.orders]
        self.unposted: list[
            dict[tuple[int, int], list[int]]
        ] = []  # rank -> (RECV kind, stage) -> receives still to post
        self.posted: set[int] = set()
        self.sent: set[int] = set()  # receives whose data is on its way

    def needs(self, rank: int, action: int) -> int | None:
        """The receive that this F, I or B waits for."""
        kind, stage, i = kind_of(action), stage_of(action), microbatch_of(action)
        source = stage - 1 if kind == FORWARD else stage + 1 if kind in (INPUT, BACKWARD) else -1
        if not 0 <= source < self.plan.stages or self.home[source, i] == rank:
            return None
        return pack(RECV_F if kind == FORWARD else RECV_B, stage, i)

    def sends(self, rank: int, action: int) -> tuple[int, int, int] | None:
        """(SEND, the RECV that it meets, the receiver's rank)."""
        kind, stage, i = kind_of(action), stage_of(action), microbatch_of(action)
        forward = kind == FORWARD
        target = stage + 1 if forward else stage - 1
        if kind not in (FORWARD, INPUT, BACKWARD) or not 0 <= target < self.plan.stages or self.home[target, i] == rank:
            return None
        return (
            pack(SEND_F if forward else SEND_B, stage, i),
            pack(RECV_F if forward else RECV_B, target, i),
            self.home[target, i],
        )

    def post(self, rank: int, channel: tuple[int, int]) -> None:
        receives = self.unposted[rank][channel]
        if receives:
            self.posted.add(receives[0])
            self.out[rank].append(receives.pop(0))

    def run(self) -> list[list[Item]]:
        plan, ranks = self.plan, range(self.plan.ranks)
        for rank, order in enumerate(plan.orders):
            channels: dict[tuple[int, int], list[int]] = {}
            for item in order:
                for action in parts(item):
                    receive = self.needs(rank, action)
                    if receive is not None:
                        channels.setdefault((kind_of(receive), stage_of(receive)), []).append(receive)
            self.unposted.append(channels)
            for channel in channels:
                for _ in range(self.prefetch):
                    self.post(rank, channel)
        at, clock = [0] * plan.ranks, [0] * plan.ranks
        outbox: list[list[tuple[int, int, int]]] = [[] for _ in ranks]
        computed: set[tuple[bool, int, int]] = set()  # (forward?, stage, micro-batch)
        heap = [(0, rank) for rank in ranks]
        idle: set[int] = set()

        def wake() -> None:
            for rank in sorted(idle):
                heapq.heappush(heap, (clock[rank], rank))
            idle.clear()

        while heap or any(at[r] < len(plan.orders[r]) or outbox[r] for r in ranks):
            if not heap:  # a standstill: one more buffer for a send that blocks
                self._one_more_buffer(outbox)
                wake()
                continue
            _, rank = heapq.heappop(heap)
            if outbox[rank]:
                send, receive, _ = outbox[rank][0]
                if receive not in self.posted:
                    idle.add(rank)
                    continue
                self.out[rank].append(send)
                self.sent.add(receive)
                outbox[rank].pop(0)
            elif at[rank] < len(plan.orders[rank]):
                item = plan.orders[rank][at[rank]]
                if not all(self.ready(rank, action, computed) for action in parts(item)):
                    idle.add(rank)
                    continue
                self.out[rank].append(item)
                at[rank] += 1
                clock[rank] += 1
                for action in parts(item):
                    computed.add((kind_of(action) == FORWARD, stage_of(action), microbatch_of(action)))
                    receive = self.needs(rank, action)
                    if receive is not None:
                        self.post(rank, (kind_of(receive), stage_of(receive)))
                    send_ = self.sends(rank, action)
                    if send_ is not None:
                        outbox[rank].append(send_)
            else:
                continue
            heapq.heappush(heap, (clock[rank], rank))
            wake()
        return self.out

    def ready(self, rank: int, action: int, computed: set[tuple[bool, int, int]]) -> bool:
        receive = self.needs(rank, action)
        if receive is not None:
            return receive in self.sent
        kind, stage, i = kind_of(action), stage_of(action), microbatch_of(action)
        if kind == FORWARD:
            return stage == 0 or (True, stage - 1, i) in computed
        if kind in (INPUT, BACKWARD):
            return stage + 1 == self.plan.stages or (False, stage + 1, i) in computed
        return True

    def _one_more_buffer(self, outbox: list[list[tuple[int, int, int]]]) -> None:
        for waiting in outbox:
            if waiting:
                _, receive, receiver = waiting[0]
                channel = kind_of(receive), stage_of(receive)
                while receive not in self.posted:
                    self.post(receiver, channel)
                return
        raise UsageError(
            f"plan {self.plan.name!r} comes to a standstill; validate it first (minidist.pipeline.validate)"
        )


def lower_blocking(plan: Plan) -> Plan:
    """The order of runtimes whose RECV stops the rank. One action a rank and turn, rank after rank, and a RECV stands
    where the receiver was when the sender sent.

    Nothing is posted ahead, so a rank waits for data that it does not need yet. For comparison only (time_plan with
    receives="blocking"): 1F1B idles two to four times as long.
    """
    if plan.is_lowered:
        raise UsageError(f"plan {plan.name!r} has sends and receives already; lower a plan of computations only")
    walk, at = _Walk(plan, 1), [0] * plan.ranks
    computed: set[tuple[bool, int, int]] = set()
    while any(at[rank] < len(order) for rank, order in enumerate(plan.orders)):
        moved = False
        for rank, order in enumerate(plan.orders):
            if at[rank] == len(order) or not all(
                walk.ready(rank, action, computed) for action in parts(order[at[rank]])
            ):
                continue
            item, moved = order[at[rank]], True
            walk.out[rank].append(item)
            at[rank] += 1
            for action in parts(item):
                computed.add((kind_of(action) == FORWARD, stage_of(action), microbatch_of(action)))
                transfer = walk.sends(rank, action)
                if transfer is not None:
                    send, receive, receiver = transfer
                    walk.out[rank].append(send)
                    walk.out[receiver].append(receive)
                    walk.sent.add(receive)
        if not moved:
            raise UsageError(
                f"plan {plan.name!r} comes to a standstill; validate it first (minidist.pipeline.validate)"
            )
    return plan.with_orders(walk.out)


def reduce_gradients(plan: Plan) -> Plan:
    """REDUCE_GRAD directly after each stage's last B or W on a rank (where a step has one update)."""
    if plan.updates != "flush":
        return plan
    orders = []
    for order in plan.orders:
        last = {
            stage_of(a): at for at, item in enumerate(order) for a in parts(item) if kind_of(a) in (BACKWARD, WEIGHT)
        }
        done = {at: sorted(stage for stage in last if last[stage] == at) for at in last.values()}
        orders.append(
            [x for at, item in enumerate(order) for x in (item, *(pack(REDUCE_GRAD, s) for s in done.get(at, ())))]
        )
    return plan.with_orders(orders)


def merge(plan: Plan) -> Plan:
    """Adjacent I and W of one micro-batch become B."""
    orders = []
    for order in plan.orders:
        merged: list[Item] = []
        for item in order:
            before = merged[-1] if merged else None
            if (
                isinstance(item, int)
                and kind_of(item) == WEIGHT
                and before == pack(INPUT, stage_of(item), microbatch_of(item))
            ):
                merged[-1] = pack(BACKWARD, stage_of(item), microbatch_of(item))
            else:
                merged.append(item)
        orders.append(merged)
    return plan.with_orders(orders)


def split(plan: Plan) -> Plan:
    """Every B that is not in an overlapped pair becomes I and W."""

    def halves(item: Item) -> Iterable[Item]:
        if isinstance(item, int) and kind_of(item) == BACKWARD:
            return pack(INPUT, stage_of(item), microbatch_of(item)), pack(WEIGHT, stage_of(item), microbatch_of(item))
        return (item,)

    return plan.with_orders([[half for item in order for half in halves(item)] for order in plan.orders])


def recompute(plan: Plan, stages: Iterable[int] | None = None) -> Plan:
    """RECOMPUTE directly before the B or I of the given stages (default: all). UsageError on an overlapped pair."""
    if plan.updates == "none":
        return plan
    chosen = set(range(plan.stages)) if stages is None else set(stages)
    for stage in sorted(chosen):
        if not 0 <= stage < plan.stages:
            raise UsageError(f"cannot recompute stage {stage}: the plan has stages 0 to {plan.stages - 1}")
    orders: list[list[Item]] = []
    for order in plan.orders:
        orders.append([])
        for item in order:
            for action in parts(item):
                if kind_of(action) in (BACKWARD, INPUT) and stage_of(action) in chosen:
                    if isinstance(item, tuple):
                        raise UsageError(
                            f"cannot recompute in the overlapped {show(item)}; recompute stages without overlap only"
                        )
                    orders[-1].append(pack(RECOMPUTE, stage_of(action), microbatch_of(action)))
            orders[-1].append(item)
    return plan.with_orders(orders)


def forwards(plan: Plan) -> Plan:
    """The plan's forward passes alone: an evaluation with every stage where the plan has it. What waited in them for
    nothing but forward passes does so still, so it cannot stand still where the plan did not.
    """
    orders = [[part for item in order for part in parts(item) if kind_of(part) == FORWARD] for order in plan.orders]
    return replace(plan, name=f"{plan.name} (forwards)", orders=orders, updates="none")


def computations(plan: Plan) -> Plan:
    """A lowered plan without its transfers and reductions."""
    return plan.with_orders([[item for item in order if kind_of(parts(item)[0]) in COMPUTE] for order in plan.orders])
