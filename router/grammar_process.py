"""Tries grammars, one after the other, in a process that may be killed (FAULTS S08). Started by front/grammar_judge.py.

    stdin    one JSON line a Question
    stdout   one JSON line an Answer; a first one as soon as it is ready, with the reason if it never will be
It builds what an engine would build, with the model's own tokenizer, and asks it once what may come first. The kernel
ends it where a question takes more processor time or memory than it may: its death is the answer.
"""

import argparse
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cluster.core.errors import GrammarError
from cluster.core.grammar import Vocabulary, folder_vocabulary, tracer_vocabulary
from cluster.program import die_with_parent
from router.front.grammar_judge import Answer, Question

CPU_S = 2
MEMORY_BYTES = 512 * 1024 * 1024
_NICE = 10  # others' streams come first
_TRACER_TOKENS = 1024  # the tracer's default: what a grammar is worth does not depend on it


def answer(vocabulary: Vocabulary, question: Question) -> Answer:
    """Whether this is a grammar that something can be written under."""
    try:
        vocabulary.compile(question.kind, question.source).allowed()
    except GrammarError as error:
        return Answer(str(error))
    return Answer("")


def main(arguments: Sequence[str] | None = None) -> None:
    """Until stdin ends."""
    parser = argparse.ArgumentParser(description="Tries grammars for a router; started by it, not by hand.")
    parser.add_argument("--folder", type=Path, help="the model's folder; without it, the tracer model")
    folder: Path | None = parser.parse_args(arguments).folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the router's business
    die_with_parent()
    os.nice(_NICE)
    try:
        vocabulary = tracer_vocabulary(_TRACER_TOKENS) if folder is None else folder_vocabulary(folder)
    except GrammarError as error:
        _say(Answer(str(error)))
        return
    _say(Answer(""))
    _limit(resource.RLIMIT_AS, _address_space() + MEMORY_BYTES)
    decoder = msgspec.json.Decoder(Question)
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + CPU_S)
        _say(answer(vocabulary, decoder.decode(line)))


def _say(what: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


def _limit(what: int, value: int) -> None:
    """The soft limit alone: it is moved with every question."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space() -> int:
    """Bytes mapped now, most of them by libraries that never touch them; 0 where nobody says."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return 4 * MEMORY_BYTES
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
