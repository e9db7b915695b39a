"""How much an object remembers: what must not grow with the number of requests it has served."""

from collections import Counter, OrderedDict, deque

OURS = ("router", "prefill_worker", "decode_worker", "kv_transfer", "engine", "cluster")
CONTAINERS = (dict, OrderedDict, list, set, frozenset, deque, tuple)


def weight(thing: object) -> int:
    """Entries in all containers that can be reached from `thing` through objects of our own classes.

    Counters are left out: their names are a bounded few (tests/unit/workers/test_links.py).
    """
    seen: set[int] = set()
    total, todo = 0, [thing]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, Counter):
            continue
        seen.add(id(one))
        if isinstance(one, CONTAINERS):
            total += len(one)
            todo += [*one.keys(), *one.values()] if isinstance(one, dict) else list(one)
        elif type(one).__module__.partition(".")[0] in OURS and not isinstance(one, type):
            todo += _attributes(one)
    return total


def _attributes(one: object) -> list[object]:
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(one, "__dict__", {}).values(), *(getattr(one, name) for name in slots if hasattr(one, name))]
