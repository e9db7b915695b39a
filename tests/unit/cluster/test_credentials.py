"""Members prove that they know the secret, for one call at one port, now; nothing else is let in."""

import pytest

from cluster.core.clock import ManualClock
from cluster.credentials import WINDOW_S, Credentials

PORT = 4711
ADDRESS = f"10.0.0.1:{PORT}"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_a_member_is_let_in_and_knows_who_answers(clock: ManualClock) -> None:
    one, other = Credentials("the secret", clock=clock), Credentials("the secret", clock=clock)
    proof = one.proof(ADDRESS)
    assert proof.is_answered_by(other.check(proof.given, PORT))


def test_a_proof_is_good_once_at_one_port(clock: ManualClock) -> None:
    one, other = Credentials("the secret", clock=clock), Credentials("the secret", clock=clock)
    proof = one.proof(ADDRESS)
    assert other.check(proof.given, PORT + 1) is None
    assert other.check(proof.given, PORT) is not None
    assert other.check(proof.given, PORT) is None


@pytest.mark.parametrize("apart", [-WINDOW_S - 1, -WINDOW_S + 1, WINDOW_S - 1, WINDOW_S + 1])
def test_clocks_may_be_apart_but_not_far(clock: ManualClock, apart: float) -> None:
    theirs = ManualClock(WINDOW_S * 10 + apart)
    clock.advance(WINDOW_S * 10)
    given = Credentials("the secret", clock=theirs).proof(ADDRESS).given
    assert (Credentials("the secret", clock=clock).check(given, PORT) is not None) == (abs(apart) < WINDOW_S)


def test_what_was_used_is_remembered_as_long_as_it_could_be_used(clock: ManualClock) -> None:
    """A proof from the future of the server's clock lives longest."""
    theirs = ManualClock(WINDOW_S - 1)
    given = Credentials("the secret", clock=theirs).proof(ADDRESS).given
    server = Credentials("the secret", clock=clock)
    assert server.check(given, PORT) is not None
    for _ in range(20):
        clock.advance(WINDOW_S / 5)
        assert server.check(Credentials("the secret", clock=clock).proof(ADDRESS).given, PORT) is not None
        assert server.check(given, PORT) is None
    assert len(server._used) <= 11


@pytest.mark.parametrize(
    "given", [None, "", "..", "...", "a.b.c", "x" * 5000, "\udcff.1.2", "the secret", f"{'0' * 32}.nan.{'0' * 64}"]
)
def test_what_is_no_proof(clock: ManualClock, given: str | None) -> None:
    assert Credentials("the secret", clock=clock).check(given, PORT) is None


def test_every_part_of_a_proof_counts(clock: ManualClock) -> None:
    number, told, mac = Credentials("the secret", clock=clock).proof(ADDRESS).given.split(".")
    server = Credentials("the secret", clock=clock)
    changed = [f"{number[:-1]}z.{told}.{mac}", f"{number}.{int(told) + 1}.{mac}", f"{number}.{told}.{mac[:-1]}z"]
    assert [server.check(each, PORT) for each in changed] == [None, None, None]
    assert server.check(f"{number}.{told}.{mac}", PORT) is not None


def test_a_stranger_cannot_answer(clock: ManualClock) -> None:
    proof = Credentials("the secret", clock=clock).proof(ADDRESS)
    number, _, mac = proof.given.split(".")
    for answer in (None, "", proof.given, number, mac, Credentials("a guess")._mac("answer", number)):
        assert not proof.is_answered_by(answer)


def test_the_secret_is_not_said(clock: ManualClock) -> None:
    assert "the secret" not in repr(Credentials("the secret", clock=clock).proof(ADDRESS))
