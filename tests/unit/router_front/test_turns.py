"""Turns: in rotation, in order, and passed on by whoever leaves; and the judge of grammars, who takes them."""

import asyncio
from collections import deque

import pytest

from cluster.core.errors import Overloaded
from router.front import grammar_judge
from router.front.grammar_judge import GrammarJudge, Question
from router.front.turns import Turns
from router.requests import Grammar


class Asking:
    """Takes turns, and tells of each whose it was."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.served: list[str] = []
        self.go_on = asyncio.Event()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str) -> None:
        """Whose turn it is is the first letter."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._take(name))
            await asyncio.sleep(0)

    async def _take(self, name: str) -> None:
        async with self.turns.turn(name[0]):
            self.served.append(name)
            await self.go_on.wait()

    async def all_served(self) -> list[str]:
        self.go_on.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        async with asyncio.timeout(1), self.turns.turn("z"):
            return self.served


async def test_everybody_in_rotation_and_each_in_order() -> None:
    asking = Asking()
    await asking.ask("a1", "a2", "a3", "a4", "b1", "c1", "b2")
    assert await asking.all_served() == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


@pytest.mark.parametrize("leaving", [["a1"], ["a2"], ["b1"], ["a1", "a2"], ["a2", "a3"], ["a1", "a2", "a3", "b1"]])
async def test_who_leaves_is_passed_over_and_passes_its_turn_on(leaving: list[str]) -> None:
    asking = Asking()
    await asking.ask("a1", "a2", "a3", "b1")
    for name in leaving:
        asking.tasks[name].cancel()
    left = [name for name in ("a1", "a2", "b1", "a3") if name not in leaving]
    served = await asking.all_served()
    assert [name for name in served if name not in leaving] == left


async def test_a_turn_that_has_just_come_to_one_who_leaves_is_passed_on() -> None:
    asking = Asking()
    await asking.ask("a1", "a2", "b1")
    asking.go_on.set()
    await asyncio.sleep(0)  # a1 has left; a2 has been told and has not heard of it
    asking.tasks["a2"].cancel()
    assert await asking.all_served() == ["a1", "b1"]


class Slow(GrammarJudge):
    """Takes its time over each question."""

    def __init__(self) -> None:
        super().__init__(())
        self.looked_at: deque[str] = deque()
        self.go_on = asyncio.Event()

    async def _ask(self, question: Question) -> str:
        self.looked_at.append(question.source)
        await self.go_on.wait()
        return ""


async def test_bombs_of_one_tenant_hold_up_each_other_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_judge, "MAX_WAITING", 9)
    judge = Slow()
    asked = []
    for tenant, source in (*(("loud", f"bomb {n}") for n in range(9)), ("calm", "one"), ("other", "two")):
        asked.append(asyncio.ensure_future(judge.check(Grammar("regex", source), "guided_regex", tenant)))
        await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await judge.check(Grammar("regex", "bomb 9"), "guided_regex", "loud")
    judge.go_on.set()
    await asyncio.gather(*asked)
    assert list(judge.looked_at)[:4] == ["bomb 0", "bomb 1", "one", "two"]
    await judge.check(Grammar("regex", "bomb 9"), "guided_regex", "loud")
