"""The OpenAPI document of the HTTP API: bodies.py says what is taken, answers.py what comes back, document.py joins."""
