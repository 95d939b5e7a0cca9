"""RoPE of q and k and the write of k and v into a KV cache: one operation, several implementations (`api`)."""

from .api import rope_and_cache_ as rope_and_cache_
