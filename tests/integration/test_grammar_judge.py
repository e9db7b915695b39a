"""The process that tries grammars: what it says, what kills it, and who waits for it (FAULTS S08)."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.core.errors import InvalidRequest, Overloaded, Unavailable
from router.front import grammar_judge
from router.front.grammar_judge import GrammarJudge, judge_of
from router.requests import Grammar

GOOD = Grammar("regex", "a+")

# Answers like the real one, but is killed by what it is asked, or never answers.
BREAKABLE = """
import os, sys, time
print('{"error":""}', flush=True)
for line in sys.stdin:
    if "die" in line:
        os.kill(os.getpid(), 9)
    if "hang" not in line:
        print('{"error":""}', flush=True)
"""


@pytest.fixture
async def judge() -> AsyncIterator[GrammarJudge]:
    judge = judge_of(None)
    yield judge
    await judge.close()


@pytest.fixture
async def breakable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarJudge]:
    script = tmp_path / "breakable.py"
    script.write_text(BREAKABLE)
    monkeypatch.setattr(grammar_judge, "COMMAND", (sys.executable, str(script)))
    judge = GrammarJudge((), patience_s=0.5)
    yield judge
    await judge.close()


async def refusal(judge: GrammarJudge, grammar: Grammar) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await judge.check(grammar, "guided_regex")
    assert (caught.value.param, caught.value.code) == ("guided_regex", "invalid_grammar")
    return caught.value.message


async def test_every_kind_is_tried_with_a_real_vocabulary(judge: GrammarJudge) -> None:
    await judge.check(Grammar("json_object"), "response_format")
    await judge.check(Grammar("json_schema", '{"type": "integer"}'), "response_format")
    await judge.check(Grammar("lark", 'start: "a" | "b"'), "guided_grammar")
    await judge.check(GOOD, "guided_regex")
    assert "invalid regex" in await refusal(judge, Grammar("regex", "("))
    assert "uniqueItems" in await refusal(judge, Grammar("json_schema", '{"type": "array", "uniqueItems": true}'))
    assert "unknown name" in (await refusal(judge, Grammar("lark", "start: nothing"))).lower()
    assert "is no kind" in await refusal(judge, Grammar("ebnf", "x"))  # type: ignore[arg-type]
    assert await refusal(judge, Grammar("json_schema", '{"$ref": "#"}'))


async def test_what_was_judged_is_remembered_and_asked_once_by_all(breakable: GrammarJudge) -> None:
    await asyncio.gather(*(breakable.check(GOOD, "guided_regex") for _ in range(200)))
    await breakable.close()  # nobody is left to ask
    await breakable.check(GOOD, "guided_regex")


async def test_what_kills_the_process_is_refused_and_the_next_one_is_judged(breakable: GrammarJudge) -> None:
    for name in ("die", "die again"):
        assert "too much time or memory" in await refusal(breakable, Grammar("regex", name))
    await breakable.check(GOOD, "guided_regex")


async def test_a_process_that_dies_as_it_starts_says_nothing_of_the_grammar(
    breakable: GrammarJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(grammar_judge, "COMMAND", (sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"))
        for _ in range(2):
            with pytest.raises(Unavailable, match="ask again"):
                await breakable.check(GOOD, "guided_regex")
    await breakable.check(GOOD, "guided_regex")


async def test_who_hears_nothing_is_told_to_come_back_and_nothing_is_remembered(breakable: GrammarJudge) -> None:
    for _ in range(2):
        with pytest.raises(Overloaded, match="too busy"):
            await breakable.check(Grammar("regex", "hang"), "guided_regex")
    await breakable.check(GOOD, "guided_regex")


async def test_the_line_is_bounded(breakable: GrammarJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_judge, "MAX_WAITING", 2)
    asked = [breakable.check(Grammar("regex", f"{i}"), "guided_regex") for i in range(3)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), type(None), Overloaded]


async def test_a_client_that_leaves_does_not_leave_its_answer_to_the_next(breakable: GrammarJudge) -> None:
    leaving = asyncio.ensure_future(breakable.check(Grammar("regex", "die"), "guided_regex"))
    await asyncio.sleep(0)
    leaving.cancel()
    await breakable.check(GOOD, "guided_regex")
    assert "too much" in await refusal(breakable, Grammar("regex", "die"))
