"""The judge of a chaos run can say no: each thing that may be wrong with an answer is seen."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from chaos.ask import Ask, Manner, random_ask
from chaos.disturb import Disturbance, Disturbances
from chaos.exchange import End, Exchange
from chaos.reference import TracerReference
from chaos.report import Report, percentile
from chaos.settings import ChaosSettings
from chaos.tally import Tally, count_failover, judge
from engine.messages import TracerModel
from router.front.stops import StopStrings
from router.front.text import SampleText, TextRules
from router.front.tokenizer import TracerTokenizer

SPEC = TracerModel(vocab_size=300)
REFERENCE = TracerReference(SPEC)
ASK = Ask((1, 2, 3), max_tokens=9, n=2, temperature=0.8, seed=5, logprobs=1)
STREAM = Manner("grpc", stream=True)


def right(end: End = End.OK) -> Exchange:
    """What a client of ASK must see, over gRPC."""
    answer = REFERENCE.answer(ASK)
    return Exchange(
        asked=10.0,
        texts=[each.text for each in answer],
        tokens=[list(each.tokens) for each in answer],
        reasons=[each.reason for each in answer],
        logprobs=[list(each.logprobs) for each in answer],
        end=end,
        completion_tokens=sum(len(each.tokens) for each in answer),
    )


def test_the_right_answer_is_right() -> None:
    assert judge(ASK, right(), REFERENCE) is None


def test_a_beginning_is_right_for_who_left_and_for_nobody_else() -> None:
    for end in (End.LEFT, End.BROKEN, End.FAILED, End.OK):
        exchange = right(end)
        assert exchange.tokens is not None
        exchange.tokens[1] = exchange.tokens[1][:3]
        exchange.texts[1], exchange.reasons[1], exchange.completion_tokens = "", "", None
        exchange.logprobs[1] = exchange.logprobs[1][:3]
        assert (judge(ASK, exchange, REFERENCE) is None) == (end is not End.OK)


@pytest.mark.parametrize("end", [End.OK, End.LEFT, End.BROKEN])
@pytest.mark.parametrize("what", ["token", "repeated", "text", "swapped", "logprob", "logprob twice"])
def test_every_wrong_thing_is_seen(what: str, end: End) -> None:
    exchange = right(end)
    assert exchange.tokens is not None
    if what == "token":
        exchange.tokens[1][4] ^= 1
    elif what == "repeated":
        exchange.tokens[0].insert(3, exchange.tokens[0][2])
    elif what == "text":
        exchange.texts[0] = exchange.texts[0][:-1] + "#"
    elif what == "logprob":
        exchange.logprobs[1][4] += 0.01
    elif what == "logprob twice":
        exchange.logprobs[0].insert(3, exchange.logprobs[0][2])
    else:
        exchange.tokens.reverse()
    assert judge(ASK, exchange, REFERENCE) is not None


def test_logprobs_that_nobody_asked_for_are_seen() -> None:
    assert "logprobs" in str(judge(replace(ASK, logprobs=None), right(), REFERENCE))


def test_reason_and_usage_of_a_whole_answer_count() -> None:
    exchange = right()
    exchange.reasons[0] = "stop"
    assert "ended by" in str(judge(ASK, exchange, REFERENCE))
    exchange = right()
    exchange.completion_tokens = 17
    assert "completion tokens" in str(judge(ASK, exchange, REFERENCE))


def test_the_reference_spells_tokens_as_the_router_does() -> None:
    """Two ways to the same text: one decode of all bytes here, the router's incremental fold there."""
    rng, appetite, stopped = random.Random(1), ChaosSettings().appetite(), 0
    for _ in range(80):
        ask = random_ask(rng, appetite)
        for index, expected in enumerate(REFERENCE.answer(ask)):
            ends = frozenset() if ask.ignore_eos else frozenset({SPEC.vocab_size - 1})
            stops, least = StopStrings(ask.stop), ask.rules.min_tokens
            rules = TextRules(TracerTokenizer(), ends, ask.max_tokens, stops, fresh=False, min_tokens=least)
            told = SampleText(index, rules).feed(list(expected.tokens))
            assert (told.text, told.finish) == (expected.text, expected.reason), ask
            assert len(told.ids) == len(expected.tokens), ask
            stopped += bool(ask.stop) and expected.reason == "stop"
    assert stopped > 3


def failover(begin: float, *faults: Disturbance) -> Tally:
    tally, exchange = Tally(), right()
    exchange.attempts, exchange.asked, exchange.arrivals = (
        2,
        begin - 0.2,
        [begin, begin + 0.1, begin + 1.6, begin + 1.7],
    )
    count_failover(tally, exchange, ASK, STREAM, Disturbances(list(faults)), "router-0")
    return tally


def test_a_gap_belongs_to_the_fault_within_it() -> None:
    kill = Disturbance("decode-0", "decode", "kill engine", 11.0, 11.1, 14.0)
    stop = Disturbance("prefill-1", "prefill", "stop both", 9.0, 12.0, 12.5)
    assert failover(10.5, kill).gaps_s == {"kill": [pytest.approx(1.5)]}
    assert failover(10.5, kill, stop).gaps_s == {"kill with others": [pytest.approx(1.5)]}
    router = Disturbance("router-0", "router", "stop", 10.0, 10.9, 11.5)
    assert failover(10.5, kill, router).gaps_s == {"kill with others": [pytest.approx(1.5)]}
    elsewhere = replace(router, name="router-1")
    assert failover(10.5, kill, elsewhere).gaps_s == {"kill": [pytest.approx(1.5)]}
    assert failover(20.0, kill).gaps_s == {}
    assert failover(20.0, kill).failovers == 1


def test_disturbances_cover_what_ran_meanwhile() -> None:
    done = Disturbances([Disturbance("router-0", "router", "kill", 5.0, 5.2)])
    assert done.happened("router-0", ("kill",), 4.0, 5.1)
    assert done.happened("router-0", ("kill",), 5.1, 9.0)
    assert not done.happened("router-0", ("kill",), 5.3, 9.0)
    assert not done.happened("router-1", ("kill",), 4.0, 5.1)
    assert not done.happened("router-0", ("stop",), 4.0, 5.1)
    assert Disturbance("router-0", "router", "kill", 5.0).end == math.inf


def test_a_report_is_not_ok_when_anything_is_broken() -> None:
    fine = Report(1.0, Tally(outcomes=Counter(ok=3)), Counter(), Counter(), Counter())
    assert fine.ok
    assert "all invariants held" in list(fine.lines())
    nothing = replace(fine, tally=Tally())
    assert not nothing.ok, "a run without an answer proves nothing"
    for broken in (
        replace(fine, leaked={"decode-0 blocks_in_use": 1}),
        replace(fine, unrecovered=["decode-0 after kill"]),
        replace(fine, tally=Tally(Counter(ok=3), wrong=["x"])),
        replace(fine, tally=Tally(Counter(ok=3), failed=["x"])),
        replace(fine, tally=Tally(Counter(ok=3), hung=["x"])),
    ):
        assert not broken.ok
        assert list(broken.lines())[-1] == "INVARIANTS BROKEN"


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([3.0], 0.5) == 3.0
