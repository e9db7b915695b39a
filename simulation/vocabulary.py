"""The tracer's vocabulary for grammars: one for all engines of a process, since every life of a worker needs it."""

from functools import lru_cache

from cluster.core.grammar import Vocabulary, tracer_vocabulary


@lru_cache(maxsize=8)
def tracer_vocabulary_of(size: int) -> Vocabulary:
    """That of a tracer with so many tokens."""
    return tracer_vocabulary(size)
