"""RMSNorm of q and k followed by RoPE as one operation (`api.qk_norm_rope`)."""

from .api import qk_norm_rope as qk_norm_rope
