"""Drop-in replacements for the RoPE and GLU functions of other libraries: same signatures, fusewise's operators.

Change one import:

    from flash_attn.layers.rotary import apply_rotary_emb            # before
    from fusewise.compat.flash_attn import apply_rotary_emb          # after

One module per library. Importing it does not import the library:

    flash_attn           apply_rotary_emb, apply_rotary_emb_qkv_, apply_rotary_emb_kv_, apply_rotary, RotaryEmbedding
    transformer_engine   apply_rotary_pos_emb, apply_fused_qkv_rotary_pos_emb, RotaryPositionEmbedding, FusedRoPEFunc, geglu, dgeglu
                         and the other gates, GEGLU, GLU, ReGLU, SwiGLU
    vllm                 rotary_embedding, get_rope, RotaryEmbedding, MRotaryEmbedding, the layers with scaling, multi-axis RoPE or
                         dual chunk attention, ApplyRotaryEmb, SiluAndMul and the other gates
    flashinfer           apply_rope*, apply_llama31_rope*, apply_rope_with_cos_sin_cache*
    liger                liger_rotary_pos_emb and its variants, LigerRopeFunction, LigerGELUMulFunction,
                         LigerSiLUMulFunction, LigerGEGLUMLP, LigerSwiGLUMLP, the model-specific and the tiled MLPs
    transformers         apply_rotary_pos_emb and one function for each other convention among its models, GemmaMLP,
                         LlamaMLP, Phi3MLP and the other gated MLPs
    diffusers            apply_rotary_emb and one function for each other convention among its models, GEGLU, SwiGLU, FeedForward,
                         Flux2FeedForward

Common to all modules:

- Angles, rotation and gates are computed in float32 and rounded once, also where the library rounds intermediates, so
  results are at least as accurate as the library's. They have the dtype of the rotated or gated tensor.
- A gated MLP keeps the library's parameters and runs as one operation, `fusewise.gated_mlp`.
- One kernel launch rotates q and k together. Inputs are not copied, except tensors with a non-contiguous last dimension
  where the library accepts them. A docstring names any kernel beyond that launch.
- A position outside the table gives NaN (see `fusewise.rope`) where libraries read out of bounds or skip the token.
- Out-of-place functions are differentiable any number of times. Tables get no gradient.
- Errors read `<op>: <argument> must <contract>, got <value>; <one fix>` and are raised before anything is written.
"""
