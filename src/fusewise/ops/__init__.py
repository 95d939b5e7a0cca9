"""The operations, one folder each, and the modules they share.

    rope, gated_linear, qk_norm_rope, rope_and_cache    the operations: `api.py` is the contract, `reference.py` the reference
    dispatch     `explain_dispatch`: which implementation serves a call, and why
    _choice      selection of an implementation
    _register    registration of operators with torch
    _common      form of errors, checks of plain arguments, autograd and tensor helpers
    _overlap     whether tensors share memory
    _tuned       configurations found by `fusewise tune`
    _cases       helpers for tables of named cases

The public functions are exported by `fusewise`.
"""
