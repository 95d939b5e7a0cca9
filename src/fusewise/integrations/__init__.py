"""Integrations with other frameworks: opt-in, limited in scope, and reversible.

One module per framework, imported explicitly; importing one does not import the framework and changes nothing:

    transformers    patch(model): rotary embedding and gated MLPs of one loaded model
    thunder         executor(): fusewise's operations as single symbols in thunder.jit traces
"""
