"""Desired and actual in, actions out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.pipe import PipeError, Role
from cluster.reconcile import Action, Desired, Start, Stop, reconcile

CASES: list[tuple[Desired, list[str], list[str], list[Action]]] = [
    ({"decode": 0}, [], [], []),
    ({"decode": 2}, [], [], [Start("decode-0", "decode"), Start("decode-1", "decode")]),
    ({"decode": 1}, ["decode-0", "decode-1", "decode-2"], [], [Stop("decode-1"), Stop("decode-2")]),
    ({"decode": 3}, ["decode-0", "decode-2"], [], [Start("decode-1", "decode")]),
    ({"decode": 2}, ["decode-7"], [], [Start("decode-0", "decode")]),
    ({"decode": 2}, ["decode-0"], ["decode-1"], []),
    ({"decode": 1, "prefill": 1}, ["decode-0", "decode-1"], [], [Stop("decode-1"), Start("prefill-0", "prefill")]),
    ({"decode": 1}, ["decode-0", "prefill-0"], [], []),
    ({"decode": 2}, ["decode-1"], ["decode-0"], []),  # decode-0 drains: nobody takes its place before it is gone
    ({"decode": 2}, ["decode-1"], [], [Start("decode-0", "decode")]),  # ... and then its successor does
    ({"decode": 1}, ["decode-1"], ["decode-0"], []),  # scaled down meanwhile: it gets none
    ({"decode": 3}, ["decode-1"], ["decode-0"], [Start("decode-2", "decode")]),  # scaled up meanwhile
    ({"decode": 1}, ["decode-9", "decode-10"], [], [Stop("decode-10")]),
]


@pytest.mark.parametrize(("desired", "running", "stopping", "actions"), CASES)
def test_table(desired: Desired, running: list[str], stopping: list[str], actions: list[Action]) -> None:
    assert reconcile(desired, dict.fromkeys(running, True), stopping) == actions


def test_a_pool_does_not_lose_its_only_ready_worker_while_others_start() -> None:
    running = {"decode-0": False, "decode-1": False, "decode-2": False, "decode-3": True}
    assert reconcile({"decode": 3}, running) == [Stop("decode-2")]
    assert reconcile({"decode": 1}, running) == [Stop("decode-0"), Stop("decode-1"), Stop("decode-2")]


def test_a_foreign_name_is_refused() -> None:
    with pytest.raises(PipeError):
        reconcile({"decode": 1}, {"controller": True})


roles = st.sampled_from(["prefill", "decode", "router"])
names = st.builds("{}-{}".format, roles, st.integers(0, 12))


@given(st.dictionaries(roles, st.integers(0, 8), min_size=3), st.dictionaries(names, st.booleans()))
def test_carried_out_it_is_what_was_desired_and_then_nothing_is_left_to_do(
    desired: dict[Role, int], running: dict[str, bool]
) -> None:
    actions = reconcile(desired, running)
    ready_victims = {action.name.rpartition("-")[0] for action in actions if running.get(action.name)}
    for action in actions:
        if isinstance(action, Start):
            assert action.name not in running
            running[action.name] = False
        else:
            del running[action.name]
    for role in ready_victims:  # only where nobody is left who is of less use
        assert all(ready for name, ready in running.items() if name.startswith(role))
    for role, count in desired.items():
        assert sum(name.startswith(role) for name in running) == count
    assert reconcile(desired, running) == []


@given(st.integers(0, 8), st.sets(names), st.sets(names))
def test_a_stopping_name_is_never_started(count: int, running: set[str], stopping: set[str]) -> None:
    actions = reconcile({"decode": count}, dict.fromkeys(running - stopping, True), stopping)
    assert not {action.name for action in actions if isinstance(action, Start)} & stopping
