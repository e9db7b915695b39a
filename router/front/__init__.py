"""The front door: text in, text out. Everything here speaks to clients; router/requests.py is the only way inside.

A request passes these files in this order: http_app / http_inference / grpc_service (skins), bodies (types), ask +
bounds (what is possible), tokenizer + chat (text to ids), door (the pipeline), text + utf8 + stops (ids to text),
openai_shapes + sse (answers), errors_http (refusals), metrics (one outcome each).
"""
