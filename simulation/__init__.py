import logging

for _news in ("router.permits", "router.lines", "decode_worker.lines"):  # the book is away, attempts fail: no news here
    logging.getLogger(_news).addHandler(logging.NullHandler())
