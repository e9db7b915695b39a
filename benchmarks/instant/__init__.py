"""A decode worker that answers at once, without an engine: what is left to measure is the router."""
