"""Models on disk: known names, the cache, fetching, and GGUF -> Hugging Face conversion.

Nothing here imports torch or transformers.
"""
