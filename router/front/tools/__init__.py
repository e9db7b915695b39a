"""Tools: what a client offers, how a model is told, and how its calls are found in its text.

types.py        what is offered and what was called
plain.py        telling a model whose template knows no tools
formats.py      which format a model writes
call_object.py  one call's JSON, character by character
folds.py        text to content and calls, one fold per format
schema.py       what an answer must be when a call is demanded
"""
