"""A whole cluster on virtual time, quick enough for tens of thousands of requests: for questions of placement and load.

Real: the routers' brains (`router/dispatcher.py` with its queue, bookings, policies), the block books of each worker
with prefix index, least-recently-used eviction and cached events, the scheduler that picks each chunk, and the
measuring of rates that routers place by. Modelled (`hardware.py`): how long steps and transfers take. Left out:
engines, bytes, digests, links between workers, failures - `headrace sim` runs those, at a thousandth of the pace.

1. `traces.py`   requests of a trace, as prompts of scaled length
2. `cluster.py`  the loop, routers and workers, and who hears whom
3. `prefill.py`, `decode.py`   workers
4. `player.py`   plays requests and gives each one's outcome
"""
