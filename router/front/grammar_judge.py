"""Whether a grammar can be kept to: judged before a request is admitted, off the event loop (FAULTS S08).

1. what was judged lately is remembered by its hash
2. else a process of its own (router/grammar_process.py) tries it; it is started with the first question and stays
3. a process that dies of a question, for it has limits of time and memory, has refused it; the next question gets a new
   one. One that nobody hears of for long is killed; whose fault that was is not known, so nothing is remembered

One question at a time, tenants in rotation (turns.py): a bomb holds up other grammars for as long as it may take, and
nothing else; many bombs of one tenant hold up each other.
"""

import asyncio
import contextlib
import hashlib
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from cluster.core.errors import InvalidRequest, Overloaded, Unavailable
from router.front.turns import Turns
from router.requests import Grammar

PATIENCE_S = 10.0
START_S = 60.0
REMEMBERED = 1024
MAX_WAITING = 64  # of a tenant
COMMAND = (sys.executable, "-m", "router.grammar_process")
_MAX_LINE_BYTES = 64 * 1024
_TOO_MUCH = "building it takes too much time or memory"


class Question(msgspec.Struct, frozen=True):
    """A line to the process."""

    kind: str
    source: str


class Answer(msgspec.Struct, frozen=True):
    """A line from it. `error`: why workers cannot keep to the grammar; "" when they can."""

    error: str


class GrammarJudge:
    """One per router. `arguments` go to the process: which model's tokens."""

    def __init__(self, arguments: Sequence[str], patience_s: float = PATIENCE_S) -> None:
        self._arguments = arguments
        self._patience_s = patience_s
        self._process: asyncio.subprocess.Process | None = None
        self._turns = Turns()
        self._judged: OrderedDict[bytes, str] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[str]] = {}
        self._waiting: Counter[str] = Counter()  # of those, by who asked first

    async def check(self, grammar: Grammar, param: str, tenant: str = "") -> None:
        """Raises InvalidRequest, naming `param` and why workers cannot keep to it; Overloaded, Unavailable."""
        key = hashlib.blake2b(f"{grammar.kind} {grammar.source}".encode(), digest_size=16).digest()
        error = self._judged.get(key)
        if error is None:
            # A task of its own: who asked may leave, and the process's answer must still be read.
            task = self._asked.get(key)
            if task is None:
                if self._waiting[tenant] >= MAX_WAITING:
                    raise Overloaded("too many of your grammars wait to be looked at", retry_after_s=1.0)
                self._waiting[tenant] += 1
                task = self._asked[key] = asyncio.ensure_future(self._judge(key, grammar, tenant))
                task.add_done_callback(partial(self._over, key, tenant))
            error = await asyncio.shield(task)
        if error:
            raise InvalidRequest(f"{param} cannot be used as a grammar: {error}", param=param, code="invalid_grammar")

    async def close(self) -> None:
        """End the process. The judge may be asked again."""
        for task in list(self._asked.values()):
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        await self._end()

    async def _judge(self, key: bytes, grammar: Grammar, tenant: str) -> str:
        async with self._turns.turn(tenant):
            error = await self._ask(Question(grammar.kind, grammar.source))
        self._judged[key] = error
        while len(self._judged) > REMEMBERED:
            self._judged.popitem(last=False)
        return error

    def _over(self, key: bytes, tenant: str, task: asyncio.Task[str]) -> None:
        """However it ended, and if it never began."""
        del self._asked[key]
        self._waiting[tenant] -= 1
        if not task.cancelled():
            task.exception()  # somebody has seen it, or has left

    async def _ask(self, question: Question) -> str:
        answered = False
        try:
            process = self._process or await self._start()
            async with asyncio.timeout(self._patience_s):
                answer = await _exchange(process, msgspec.json.encode(question) + b"\n")
            answered = answer is not None
        except TimeoutError:
            raise Overloaded("this machine is too busy to look at a grammar", retry_after_s=1.0) from None
        finally:
            if not answered:
                await self._end()
        return _TOO_MUCH if answer is None else answer.error

    async def _start(self) -> asyncio.subprocess.Process:
        """A new process, which says a first word once it has read the model's tokens."""
        process = self._process = await asyncio.create_subprocess_exec(
            *COMMAND, *self._arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_MAX_LINE_BYTES,
        )  # fmt: skip
        async with asyncio.timeout(START_S):
            first = await _exchange(process, b"")
        if first is None:
            raise Unavailable("the process that looks at grammars ended as it was started; ask again")
        if first.error:
            raise InvalidRequest("this model takes no grammars", code="unsupported_parameter")
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _exchange(process: asyncio.subprocess.Process, line: bytes) -> Answer | None:
    """One line there and one back; None when it died."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, RuntimeError):  # uvloop's word for a closed pipe
        process.stdin.write(line)
        await process.stdin.drain()
    answer = await process.stdout.readline()
    return msgspec.json.decode(answer, type=Answer) if answer.endswith(b"\n") else None


def judge_of(folder: Path | None) -> GrammarJudge:
    """For a model's folder; None is the tracer model."""
    return GrammarJudge(() if folder is None else ("--folder", str(folder)))
