"""fusewise inside other frameworks: opt-in, scoped to what it is asked for, and reversible.

One module a framework, imported by name; importing one imports nothing of that framework and changes nothing:

    transformers    patch(model): rotary embedding and gated MLPs of one loaded model
    thunder         executor(): fusewise's operations, each one symbol of thunder.jit's trace
"""
