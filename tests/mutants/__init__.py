"""Mutants: proof that the tests can fail. Each is one line of the product made wrong, and the test that must notice."""

from tests.mutants import admission, engine, router, security, transfer, workers

PARTS = (transfer, engine, workers, router, admission, security)
MUTANTS = tuple(mutant for part in PARTS for mutant in part.MUTANTS)
