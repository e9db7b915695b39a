"""GET /dashboard at the admin listener: a live page of one router's view of its cluster (docs/dashboard.md).

data.py      what the page shows, as JSON, asked for once a second
assets.py    the page itself: files without a build step, under a strict Content-Security-Policy
actions.py   what operators do from it: drain a worker, scale a pool
routes.py    all of it as routes
"""
