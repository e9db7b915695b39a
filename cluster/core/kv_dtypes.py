"""How large KV is in each dtype that it is stored in: engines lay it out by this, routers reckon what has to move."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int64": 8}
SCALE_BYTES = {"int8": 4}  # a float32 beside each vector (docs/decisions/0019-kv-int8.md); no other dtype has one
