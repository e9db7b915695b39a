"""Placement: which decode worker serves a request, and which prefill workers it should ask (DESIGN §4.4). Pure.

1. `eligible.py`   who may serve it at all, the same for every policy
2. a policy        `cost.py` (the default), `round_robin.py`, `least_loaded.py`, `prefix.py`: `router.policy` names it
3. `estimate.py`   what a choice costs in milliseconds, from what workers measured of themselves (`rates.py`)
"""

from router.placement.cost import Cost
from router.placement.eligible import describe_mismatch, pairable
from router.placement.least_loaded import LeastLoaded
from router.placement.prefix import Prefix
from router.placement.rates import Rates, StepCell, read_rates
from router.placement.round_robin import RoundRobin
from router.placement.types import (
    Considered,
    Demand,
    NoPair,
    Placement,
    Policy,
    Shape,
    Snapshot,
    Wait,
    WorkerLoad,
    difference,
)

POLICIES: dict[str, type[Policy]] = {
    "cost": Cost,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix": Prefix,
}

__all__ = [
    "POLICIES",
    "Considered",
    "Demand",
    "NoPair",
    "Placement",
    "Policy",
    "Rates",
    "Shape",
    "Snapshot",
    "StepCell",
    "Wait",
    "WorkerLoad",
    "describe_mismatch",
    "difference",
    "pairable",
    "read_rates",
]
