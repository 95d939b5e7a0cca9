"""The RoPE and GLU functions of the libraries in use today, with their signatures, on fusewise's operators.

Change one import:

    from flash_attn.layers.rotary import apply_rotary_emb            # before
    from fusewise.compat.flash_attn import apply_rotary_emb          # after

One module a library, imported by name; importing one imports nothing of that library:

    flash_attn           apply_rotary_emb, apply_rotary_emb_qkv_, apply_rotary_emb_kv_, apply_rotary, RotaryEmbedding
    transformer_engine   apply_rotary_pos_emb, apply_fused_qkv_rotary_pos_emb, RotaryPositionEmbedding, FusedRoPEFunc, geglu, dgeglu
                         and their relatives, GEGLU, GLU, ReGLU, SwiGLU
    vllm                 rotary_embedding, get_rope, RotaryEmbedding, MRotaryEmbedding and the layers with scaling, of several axes
                         and of chunks, ApplyRotaryEmb, SiluAndMul and the other gates
    flashinfer           apply_rope*, apply_llama31_rope*, apply_rope_with_cos_sin_cache*
    liger                liger_rotary_pos_emb and its relatives, LigerRopeFunction, LigerGELUMulFunction,
                         LigerSiLUMulFunction, LigerGEGLUMLP, LigerSwiGLUMLP and the MLPs of other models, tiled ones too
    transformers         apply_rotary_pos_emb and one function for each other convention among its models, GemmaMLP,
                         LlamaMLP, Phi3MLP and the other forms of a gated MLP
    diffusers            apply_rotary_emb and one function for each other convention among its models, GEGLU, SwiGLU, FeedForward,
                         Flux2FeedForward

What holds for all of them:

- Angles, rotation and gates are computed in float32 and rounded once, whatever the library rounds in between, so that
  results are at least as close to the truth as the library's; they have the dtype of the rotated or gated tensor.
- A gated MLP keeps the library's parameters and is one operation, `fusewise.gated_mlp`.
- One launch rotates q and k together. Nothing is copied, but for a tensor whose last dimension is not contiguous where
  the library takes such tensors. Device kernels beyond the one launch are named in the function's docstring.
- A position without a table row gives NaN (see `fusewise.rope`) where libraries read out of bounds or skip the token.
- Out-of-place functions are differentiable any number of times; tables get no gradient.
- Errors are `<op>: <argument> must <contract>, got <value>; <one fix>`, raised before anything is written.
"""
