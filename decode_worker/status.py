"""What routers see of a decode worker twice a second (proto/watch.proto)."""

from collections import Counter

from cluster.core.ids import worker_of
from cluster.stubs.watch_pb2 import Durations, LinkRate, PrefillRate, Rates, Status, StepTime
from decode_worker.attempts import Phase
from decode_worker.peers import Peers
from decode_worker.state import State
from engine.overdue import OverdueWatch
from engine.rates import StepRates, report_queue


def make_status(state: State, peers: Peers, pace: OverdueWatch, *, handoffs: int) -> Status:
    """Everything but `ready`. `handoffs`: how many are in progress."""
    attempts = list(state.attempts.values())
    in_phase = {phase: sum(a.phase is phase for a in attempts) for phase in Phase}
    queue = [
        len(a.prompt.tokens) - a.prompt.computed
        for a in attempts
        if a.prompt is not None and a.phase is Phase.PREFILLING
    ]
    set_aside = Counter(worker_of(agent) for agent in state.staging.set_aside_peers)
    streams = [s.sequence for a in attempts if a.phase is Phase.DECODING for s in a.live if s.sequence is not None]
    return Status(
        draining=state.draining,
        free_blocks=state.books.available,
        running=sum(len(a.live) for a in attempts if a.phase is Phase.DECODING),
        waiting=in_phase[Phase.WAITING],
        queued_tokens=sum(queue),
        queue=report_queue(queue),
        handing_off=in_phase[Phase.HANDING_OFF],
        context_tokens=sum(len(stream.tokens) for stream in streams),
        rates=_rates(state, peers, pace.rates),
        steps=Durations(bounds_s=pace.steps.bounds, counts=pace.steps.counts, sum_s=pace.steps.sum_s),
        cached_blocks=state.books.cached,
        pairs=state.pairs.told(peers.living(), set_aside),
        gauges={
            "blocks_in_use": state.books.in_use,
            "slots_in_use": state.staging.in_use,
            "slots_set_aside": state.staging.set_aside,
            "attempts": len(attempts),
            "sequences": len(state.batcher.sequences),
            "handoffs": handoffs,
            "wait_line": in_phase[Phase.WAITING],
            "unsettled": state.sessions.unsettled,
        },
        counters=dict(state.counters),
    )


def _rates(state: State, peers: Peers, rates: StepRates) -> Rates:
    budget = state.batcher.budget
    return Rates(
        prefill=[PrefillRate(depth=depth, tokens_per_s=rate) for depth, rate in rates.prefill()],
        steps=[StepTime(batch=batch, context_tokens=context, seconds=s) for batch, context, s in rates.steps()],
        links=[LinkRate(epoch=epoch, gb_per_s=gb_per_s) for epoch, gb_per_s in peers.bandwidths().items()],
        chunk_tokens=budget.chunk_tokens,
        local_chunk_tokens=budget.local_tokens,
    )
