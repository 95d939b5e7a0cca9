"""The operations, a folder each, and what all of them share.

    rope, gated_linear, qk_norm_rope, rope_and_cache    each with `api.py`, the contract, and `reference.py`, the specification
    dispatch     `explain_dispatch`: which implementation a call takes, and why
    _choice      the rule by which an implementation is chosen
    _register    how operators are registered with torch
    _common      the form of errors, checks of plain arguments, questions to autograd
    _tuned       configurations that `fusewise tune` found
    _cases       what the tables of named cases have in common

The public functions are those of `fusewise` itself.
"""
