"""Benchmarks: `python -m benchmarks` (= `make bench`) measures the split and the aggregated set-up and writes a table.

1. workloads.py   what is sent, drawn up front from a seed
2. setups.py      the two clusters, their engines pinned
3. http_client.py sends and stamps; load.py drives the open and the closed loop
4. timeline.py    stamps become TTFT, TTST, ITL, TPOT; figures.py sums up a run
5. overhead.py    the router alone, in front of a worker that answers at once (instant/)
6. report.py      Markdown and JSON; samples.py: every request, for pictures
7. plot.py        pictures of results (plots/), with the extra `bench`
"""
