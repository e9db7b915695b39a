"""Where the dashboard is, at the admin listener."""

PAGE = "/dashboard"
DATA = "/dashboard/data"
DRAIN = "/admin/drain"
SCALE = "/admin/scale"

_SCRIPTS = ("app", "key", "dom", "pools", "flow", "charts", "requests", "actions")
_BESIDE = ("style.css", "icon.svg", *(f"{name}.js" for name in _SCRIPTS))
FILES = {PAGE: "index.html", **{f"{PAGE}/{name}": name for name in _BESIDE}}
"""Path -> file of the page. Open to who reaches the listener: there is nothing of this cluster in them."""

ALL = frozenset({DATA, DRAIN, SCALE, *FILES})
