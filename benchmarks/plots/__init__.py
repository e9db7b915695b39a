"""Pictures of results: `headrace bench plot RESULT.json...`, or `python -m benchmarks.plot`.

1. data.py          a result's JSON becomes what is drawn, and says what is missing. Pure, without matplotlib
2. style.py         one look, light and dark: colours that colour-blind people tell apart, each with its own line
3. distributions.py TTFT and ITL as cumulative shares
4. interference.py  requests, pools and gaps over time, split beside aggregated
5. goodput.py       what is served in time over what is asked
"""
