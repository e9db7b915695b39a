"""The router's bound on a request and the decode worker's own are one: what fits there is never refused here for good.

Found by simulation: n answers that each need a block for the rest of the prompt were admitted, then ended with a 400.
"""

import pytest

from router.requests import worst_blocks
from tests.fakes.world import World
from tests.unit.workers.test_tracer_matrix import B, config, prompt


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize(("length", "most"), [(B - 1, 1), (B - 1, 2), (B, 1), (B + 1, B), (2 * B + 11, B), (7, 3)])
def test_the_worst_case_is_what_a_decode_worker_reckons(length: int, most: int, samples: int) -> None:
    blocks = worst_blocks(length, samples, most, B)
    fits = World(config(pool_tokens=blocks * B), prefill=0)
    attempt = fits.submit(prompt(length), most, n=samples, ignore_eos=True)
    fits.run(check=True)
    assert len(fits.answers[attempt].ends) == samples
    if blocks > 1:
        small = World(config(pool_tokens=(blocks - 1) * B), prefill=0)
        attempt = small.submit(prompt(length), most, n=samples, ignore_eos=True)
        small.run(check=True)
        assert small.answers[attempt].events[-1].refused.permanent
