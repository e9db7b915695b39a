"""Mutants: proof that the tests can fail. Each is one line of the product made wrong, and the test that must notice."""

from tests.mutants import admission, engine, router, transfer, workers

MUTANTS = (*transfer.MUTANTS, *engine.MUTANTS, *workers.MUTANTS, *router.MUTANTS, *admission.MUTANTS)
