"""The grammars of one engine, ready before they are needed.

    Prepare(id, grammar) -> Prepared(id, error)     on a thread of its own, in whatever order the compute thread works
    matcher(grammar)                                a fresh start of a prepared grammar, when a sample's fold starts
Building takes milliseconds, seldom a hundred. No step waits for it: a worker lets a request with a grammar begin only
when the engine has said Prepared.
"""

import os
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable

from cluster.core.errors import GrammarError
from cluster.core.grammar import GrammarMatcher, Vocabulary
from engine.messages import Grammar, Prepare, Prepared, Report

KEPT = 64
_NICE = 10  # building a grammar must not take the compute thread's time on a busy machine


class Grammars:
    """Compiled grammars by their source, the ones used last. Thread-safe. `vocabulary` None: there can be none."""

    def __init__(self, vocabulary: Vocabulary | None, kept: int = KEPT) -> None:
        self._vocabulary = vocabulary
        self._kept = kept
        self._starts: OrderedDict[Grammar, GrammarMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Its start, for one sample. Raises GrammarError."""
        with self._lock:
            start = self._starts.get(grammar)
            if start is not None:
                self._starts.move_to_end(grammar)
                return start.copy()
        if self._vocabulary is None:
            raise GrammarError("this model has no tokenizer, so no grammar")
        start = self._vocabulary.compile(grammar.kind, grammar.source)
        with self._lock:
            self._starts[grammar] = start
            while len(self._starts) > self._kept:
                self._starts.popitem(last=False)
            return start.copy()

    def prepare(self, command: Prepare) -> Prepared:
        """Make ready, or say why not."""
        try:
            self.matcher(command.grammar)
        except GrammarError as error:
            return Prepared(command.id, str(error))
        return Prepared(command.id, "")


class GrammarThread:
    """Prepares beside the steps. `submit` may be called from any thread."""

    def __init__(
        self, grammars: Grammars, report: Callable[[Report], None], fail: Callable[[BaseException], None]
    ) -> None:
        """`report` sends a report; `fail` is told of an error that nobody expected. Both are called on the thread."""
        self._grammars = grammars
        self._report = report
        self._fail = fail
        self._queue: queue.SimpleQueue[Prepare] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="grammars", daemon=True).start()

    def submit(self, command: Prepare) -> None:
        """Hand over a command; it is answered by Prepared."""
        self._queue.put(command)

    def _run(self) -> None:
        try:
            if sys.platform == "linux":  # there, a thread has a priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            while True:
                self._report(self._grammars.prepare(self._queue.get()))
        except Exception as error:  # the guard of this loop: nobody would ever hear of another grammar
            self._fail(error)
