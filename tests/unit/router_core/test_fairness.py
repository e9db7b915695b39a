"""Shares: work goes to tenants by weight, to short and long prompts alike, and nobody starves."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fairness import Counters, length_class, work_of
from router.queue import SCAN, AdmissionQueue, LineBounds
from router.requests import Request

MOST_PROMPT, MOST_OUTPUT = 40, 30
MOST_WORK = work_of(MOST_PROMPT, MOST_OUTPUT)

weights = st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=5)
sizes = st.tuples(st.integers(1, MOST_PROMPT), st.integers(1, MOST_OUTPUT))


@dataclass
class Server:
    """Serves whoever is first in line, one at a time, and tells what each tenant was given."""

    weights: dict[str, float]
    given: dict[str, float] = field(default_factory=dict)
    served: list[tuple[str, int]] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self.queue = AdmissionQueue(LineBounds(100_000, 10**9, None, self.weights))
        self.outputs: dict[str, int] = {}
        self.tenants: dict[str, str] = {}

    def ask(self, tenant: str, prompt: int, output: int = 1, priority: int = 0) -> str:
        self.asked += 1
        name = f"r{self.asked}"
        self.outputs[name], self.tenants[name] = output, tenant
        self.queue.admit(Request(name, "x", (7,) * prompt, 1000, tenant=tenant, priority=priority), 0.0)
        return name

    def serve(self) -> str:
        entry = self.queue.scan()[0]
        output = self.outputs[entry.request_id]
        self.queue.take(entry.request_id, 0.0)
        for written in (output // 2, output):
            self.queue.written(entry, written)
        self.queue.settle(entry, output)
        self.queue.answers.answered(output)
        work = work_of(entry.prompt_tokens, output)
        self.given[entry.tenant] = self.given.get(entry.tenant, 0.0) + work
        self.served.append((entry.tenant, entry.prompt_tokens))
        return entry.request_id


@given(weights, st.lists(sizes, min_size=1, max_size=8), st.integers(20, 60))
def test_who_always_has_something_waiting_gets_work_by_weight(
    shares: list[float], shapes: list[tuple[int, int]], rounds: int
) -> None:
    server = Server({f"t{i}": weight for i, weight in enumerate(shares)})
    for at in range(rounds):
        for i, tenant in enumerate(server.weights):  # each its own mix, always two in line
            for _ in range(2 if at == 0 else 0):
                server.ask(tenant, *shapes[(at + i) % len(shapes)])
        name = server.serve()
        server.ask(server.tenants[name], *shapes[at % len(shapes)])
    parts = [server.given.get(tenant, 0.0) / weight for tenant, weight in server.weights.items()]
    assert max(parts) - min(parts) <= MOST_WORK / min(shares) + 1e-6
    server.queue.check_integrity()


@given(weights, st.lists(sizes, min_size=5, max_size=40), sizes)
def test_a_newcomer_is_served_after_at_most_two_of_each_other_tenant(
    shares: list[float], before: list[tuple[int, int]], shape: tuple[int, int]
) -> None:
    server = Server({f"t{i}": weight for i, weight in enumerate(shares)})
    flooding = list(server.weights)[1:]
    for at, one in enumerate(before):
        for _ in range(3):
            server.ask(flooding[at % len(flooding)], *one)
        server.serve()
    name = server.ask("t0", *shape)
    served = [server.serve() for _ in range(2 * len(flooding) + 1)]
    assert name in served


def test_a_tenant_that_asked_for_nothing_has_saved_nothing() -> None:
    server = Server({"busy": 1.0, "idle": 1.0})
    for _ in range(60):
        server.ask("busy", 10)
    for _ in range(40):
        server.serve()
    for _ in range(20):
        server.ask("idle", 10)
    server.served.clear()
    for _ in range(20):
        server.serve()
    assert [tenant for tenant, _ in server.served].count("idle") == 10


def test_answers_longer_than_expected_are_paid_for() -> None:
    """Both ask alike; one's answers are four times as long."""
    server = Server({"long": 1.0, "short": 1.0})
    for _ in range(60):
        server.ask("long", 10, 40)
        server.ask("short", 10, 10)
    for _ in range(60):
        server.serve()
    counts = [[tenant for tenant, _ in server.served].count(name) for name in ("long", "short")]
    assert 90 * counts[0] == pytest.approx(30 * counts[1], abs=90)


def test_what_was_charged_for_a_place_that_came_to_nothing_is_given_back() -> None:
    server = Server({"a": 1.0, "b": 1.0})
    for tenant in "ab":
        for _ in range(3):
            server.ask(tenant, 10)
    for _ in range(5):  # a decode worker refuses it again and again
        entry = server.queue.scan()[0]
        assert entry.tenant == "a"
        server.queue.take(entry.request_id, 0.0)
        server.queue.put_back(entry, 0.0, returning=False, not_before=0.0)


@given(st.lists(st.integers(-3, 3), min_size=4, max_size=20))
def test_priorities_order_the_requests_of_one_tenant_and_give_no_larger_share(priorities: list[int]) -> None:
    server = Server({"pushy": 1.0, "modest": 1.0})
    names = {server.ask("pushy", 10, 1, priority): priority for priority in priorities}
    for _ in priorities:
        server.ask("modest", 10, 1)
    served = [server.serve() for _ in range(2 * len(priorities))]
    order = [names[name] for name in served if name in names]
    assert order == sorted(priorities)
    assert [name in names for name in served[:2]].count(True) == 1
    assert abs([name in names for name in served[: len(priorities)]].count(True) - len(priorities) / 2) <= 1


@pytest.mark.parametrize("scale", [1, 4])
@pytest.mark.parametrize("short", [False, True])
def test_short_prompts_do_not_wait_behind_a_heap_of_long_ones_nor_long_ones_for_ever(scale: int, short: bool) -> None:
    lengths = (5000 * scale, 100) if short else (100, 5000 * scale)
    server = Server({})
    for _ in range(250):
        server.ask("", lengths[0])
    for _ in range(4):
        server.ask("", lengths[1])
    for _ in range(10 if short else 250):
        server.serve()
    at = [i for i, (_, prompt) in enumerate(server.served) if prompt == lengths[1]]
    if short:
        assert at == [1, 2, 3, 4], "all of them cost less than one long prompt"
    else:
        assert len(at) == min(4, 1 + 250 * 102 // (5000 * scale)), "one for as many short ones as cost the same"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6000), st.integers(-2, 2)), max_size=60))
def test_what_is_scanned_is_what_would_be_served(asked: list[tuple[str, int, int]]) -> None:
    """Were each given its place and came to what was expected, they would go in exactly this order."""
    server = Server({"a": 1.0, "b": 2.0})
    for tenant, prompt, priority in asked:
        server.ask(tenant, prompt, 1, priority)
    expected = server.queue.ids()
    assert [entry.request_id for entry in server.queue.scan()] == expected[:SCAN]
    for name in expected:
        assert server.queue.scan()[0].request_id == name
        server.queue.take(name, 0.0)
    assert len(server.queue) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500)), max_size=30), st.sampled_from("abcd"))
def test_the_work_ahead_is_what_is_served_before(waiting: list[tuple[str, int]], tenant: str) -> None:
    """The estimate for a newcomer is right up to one request of each flow."""
    counters: Counters[str] = Counters({"a": 2.0})
    lines: dict[str, list[int]] = {}
    for other, work in waiting:
        lines.setdefault(other, []).append(work)
    own = sum(lines.pop(tenant, [])) + 50
    others = {other: float(sum(works)) for other, works in lines.items()}
    told = counters.ahead(tenant, own, others, idle=True)
    lines[tenant] = [*([] if own == 50 else [own - 50]), 50]
    done = 0.0
    while lines.get(tenant):
        flow = min((f for f in lines if lines[f]), key=lambda f: (counters[f], f != tenant))
        work = lines[flow].pop(0)
        counters.serve(flow, work)
        done += work
    assert abs(told - done) <= 2 * 500 * (len(lines) + 1)


def test_classes_of_length() -> None:
    assert [length_class(n) for n in (1, 256, 257, 1024, 4096, 16_384, 16_385)] == [0, 0, 1, 1, 2, 3, 4]
