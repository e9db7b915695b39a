"""The major version of proto/: two programs talk only when theirs are equal."""

PROTOCOL = 3
