"""Patches a loaded Hugging Face transformers model to use fusewise's rotary embedding and gated MLPs.

    from fusewise.integrations.transformers import patch

    with patch(model) as handle:      # or: handle = patch(model); ...; handle.remove()
        print(handle)                 # what was replaced, what was left and why
        model.generate(...)

Only `forward` of modules of this model changes, on the instance: other models of the same class, transformers itself,
parameters, buffers, state_dict and hooks are unaffected. The forward of an attention module is its own code with other
globals, in which `apply_rotary_pos_emb` is replaced; that of an MLP is `fusewise.gated_mlp`.

Nothing is recognized by model name. A rotary function is replaced if it computes the same as one of
`fusewise.compat.transformers`, an MLP if its forward computes the same as the gated MLP; both are tested on small
tensors when `patch` is called. This needs neither transformers nor the weights of the model.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import CellType, FunctionType, MethodType, SimpleNamespace, TracebackType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..compat import transformers as compat
from ..compat._shared import known_activation
from ..ops._common import check_one_of, fail
from ..ops.gated_linear import gated_mlp
from ..ops.gated_linear._problem import SAVES, Activation, Save
from ..ops.gated_linear.projections import is_untouched, stacked_mlp
from ..ops.gated_linear.projections import mlp as separate_mlp

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Replaced:
    """A module that calls fusewise: its name in the model, its class, what was replaced and by what."""

    name: str
    type: str
    what: str


@dataclass(frozen=True)
class Left:
    """An attention, MLP or experts module that was not patched, and why."""

    name: str
    type: str
    why: str


class Patch:
    """The result of `patch`: `replaced`, `left`, `remove()`. As a context manager it removes itself on exit."""

    def __init__(
        self, forwards: dict[str, tuple[nn.Module, Forward]], replaced: list[Replaced], left: list[Left]
    ) -> None:
        self.replaced, self.left = tuple(replaced), tuple(left)
        self._forwards = {name: (module, MethodType(new, module)) for name, (module, new) in forwards.items()}
        for module, forward in self._forwards.values():
            module.forward = forward

    def remove(self) -> None:
        """Restore the class's forward of every module. A second call does nothing.

        Raises:
            RuntimeError: a module's forward was replaced since (accelerate hooks, a second patch); nothing is changed then.
        """
        changed = [name for name, (module, new) in self._forwards.items() if vars(module).get("forward") is not new]
        if changed:
            raise RuntimeError(
                f"remove: model must have the forwards that patch gave it, got another in {', '.join(changed)}; "
                "undo first what was done after patch"
            )
        for module, _ in self._forwards.values():
            del module.forward
        self._forwards = {}

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def __str__(self) -> str:
        """One line per class and outcome, or that there is none."""
        lines: dict[str, list[str]] = {}
        for entry in self.replaced:
            lines.setdefault(f"replaced  {entry.type}: {entry.what}", []).append(entry.name)
        for other in self.left:
            lines.setdefault(f"left      {other.type}: {other.why}", []).append(other.name)
        told = (f"{line} ({names[0]}{_and_more(len(names) - 1)})" for line, names in lines.items())
        return "\n".join(told) or "nothing to replace"


def patch(model: nn.Module, *, rope: bool = True, mlp: bool = True, save: Save = "preact") -> Patch:
    """Make the modules of `model` call fusewise for rotary embedding and gated MLPs, until `remove()` of the result.

    Outputs and gradients equal those of the model within the rounding of its dtype; the state_dict is unchanged.
    Projections that are quantized, adapted or have hooks, now or later, are called as modules, and so are activations
    that are replaced or have hooks. `model` is any transformers model or a part of one. A deep copy of a patched model
    stays patched; one that was pickled whole is loaded unpatched.

    Args:
        rope, mlp: what to replace.
        save: what a gated MLP saves for backward, as in `fusewise.gated_mlp`.

    Raises:
        TypeError: the model is not a module.
        ValueError: the model, or a part of it, is already patched, or `save` is invalid.
    """
    if not isinstance(model, nn.Module):
        fail("patch", "model", "be a torch.nn.Module", type(model).__name__, "pass the loaded model", TypeError)
    check_one_of("patch", "save", save, SAVES)
    forwards: dict[str, tuple[nn.Module, Forward]] = {}
    replaced: list[Replaced] = []
    left: list[Left] = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        found = _find(module, rope, mlp, save)
        if isinstance(found, str):
            left.append(Left(name, kind, found))
        elif found is not None:
            what, forward = found
            forwards[name] = module, forward
            replaced.append(Replaced(name, kind, what))
    return Patch(forwards, replaced, left)


def _find(module: nn.Module, rope: bool, mlp: bool, save: Save) -> tuple[str, Forward] | str | None:
    """The replacement forward of a module (with a description), or why it is left, or None for an unrelated module."""
    kind, own = type(module).__name__, vars(module).get("forward")
    if getattr(own, _MARK, False):
        raise ValueError(f"patch: model must not be patched already, got a patched {kind}; remove the first patch")
    defined: Any = getattr(type(module), "forward", None)
    forward = inspect.unwrap(defined)
    rotary = _rotary_names(forward)
    children = dict(module.named_children())
    gated = "down_proj" in children and ({"gate_proj", "up_proj"} <= children.keys() or "gate_up_proj" in children)
    attends, maps = rotary or "Attention" in kind, gated or kind.endswith(("MLP", "Experts"))
    if not ((rope and attends) or (mlp and maps)):
        return None
    if not rotary and not gated:
        if "Attention" in kind:
            return "it calls no rotary function"
        return "it has no modules gate_proj and up_proj, or gate_up_proj, before down_proj"
    if own is not None and getattr(own, "__func__", None) is not defined:
        return "it has a forward of its own"
    if forward is None:
        return "it is scripted"
    found = _rotary_forward(forward, rotary) if rotary else _gated_forward(module, forward, save)
    if isinstance(found, str):
        return found
    new = _decorated(defined, forward, found[1])
    return "its forward is decorated by more than functions" if new is None else (found[0], _marked(new))


def _decorated(defined: Any, forward: Forward, new: Forward) -> Forward | None:
    """`new` wrapped in copies of the decorators that turn `forward` into `defined`. None if one of them is not a
    function that holds the function it decorates in its closure."""
    if defined is forward:
        return new
    below = defined.__wrapped__
    inner = _decorated(below, forward, new)
    cells = (getattr(defined, "__closure__", None) or ()) if isinstance(defined, FunctionType) else ()
    held = [_content(cell) is below for cell in cells]
    if inner is None or not any(held):
        return None
    closure = tuple(CellType(inner) if holds else cell for cell, holds in zip(cells, held, strict=True))
    made = FunctionType(defined.__code__, defined.__globals__, defined.__name__, defined.__defaults__, closure)
    made.__kwdefaults__, made.__doc__, made.__qualname__ = defined.__kwdefaults__, defined.__doc__, defined.__qualname__
    made.__dict__.update(defined.__dict__, __wrapped__=inner)
    return made


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty cell
        return None


_MARK = "_fusewise"


def _marked(forward: Forward) -> Forward:
    """Mark a forward as ours. Pickle saves a bound method by name: a loaded model gets the forward of its class."""
    setattr(forward, _MARK, True)
    forward.__name__ = "forward"
    return forward


# Rotary embedding


def _rotary_names(forward: Forward) -> list[str]:
    """Names of the rotary functions that a forward loads from its globals."""
    code = getattr(forward, "__code__", None)
    read = () if code is None else dis.get_instructions(code)  # co_names would include attribute names
    names = dict.fromkeys(step.argval for step in read if step.opname == "LOAD_GLOBAL")
    rotary = [name for name in names if name.startswith(("apply_rotary", "apply_multimodal_rotary"))]
    return [name for name in rotary if name in forward.__globals__]  # a conditional import may have skipped it


def _rotary_forward(forward: Any, names: list[str]) -> tuple[str, Forward] | str:
    """The same code with these global names replaced. Dynamo looks up globals through the module `__name__`; without
    one it uses the function's own."""
    ours = {name: _convention(forward.__globals__[name]) for name in names}
    if unknown := [name for name, function in ours.items() if function is None]:
        return f"its {unknown[0]} rotates in no way that fusewise.compat.transformers knows"
    namespace = {name: value for name, value in forward.__globals__.items() if name != "__name__"}
    namespace |= {name: _or_own(function, namespace[name]) for name, function in ours.items() if function}
    new = FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__)
    new.__kwdefaults__, new.__doc__, new.__qualname__ = forward.__kwdefaults__, forward.__doc__, forward.__qualname__
    what = ", ".join(f"{name} by {function.__name__}" for name, function in ours.items() if function)
    return what, new


@cache  # one function for all layers and patches: torch.compile guards on it
def _or_own(ours: Forward, theirs: Forward) -> Forward:
    """Ours, and theirs where `rope` does not apply: to tables that require grad (MLCD learns its class token's angles), and
    to q with fewer tokens than k (muse_glimmer_assistant)."""
    names = tuple(inspect.signature(ours).parameters)

    def apply_rotary(*args: Any, **named: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | named
        learned = any(given[name].requires_grad for name in ("cos", "sin", "freqs_cis") if name in given)
        q, k = given.get("q"), given.get("k")
        of_tokens = _tokens_dim(given, 1 if "unsqueeze_dim" in names else -2)
        fewer = q is not None and k is not None and q.shape[of_tokens] != k.shape[of_tokens]
        return (theirs if learned or fewer else ours)(*args, **named)

    return apply_rotary


def _tokens_dim(given: dict[str, Any], unsqueeze_dim: int) -> int:
    """The dimension of the tokens of q and k: the last but one, unless the heads are inserted there into the tables."""
    rows, cos = given.get("position_ids"), given.get("cos")
    # An int is unsqueeze_dim, the fifth argument in transformers 5.
    heads: int = rows if isinstance(rows, int) else given.get("unsqueeze_dim", unsqueeze_dim)
    if heads >= 0 and cos is not None:
        heads -= 1 + (3 if isinstance(rows, Tensor) else cos.dim())
    return -3 if heads == -2 else -2


# Every rotary function of `fusewise.compat.transformers` with the layout of q and k and the format of its tables. One
# that also accepts q alone comes before the one that computes the same of q and k.
_CONVENTIONS: tuple[tuple[Callable[..., Any], str, str], ...] = (
    (compat.apply_rotary_pos_emb_qwen4_exp, "bhsd", "twice"),
    (compat.apply_rotary_pos_emb, "bhsd", "twice"),
    (compat.apply_rotary_pos_emb_glm, "bhsd", "twice"),
    (compat.apply_rotary_pos_emb_interleave, "bhsd", "twice"),
    (compat.apply_rotary_pos_emb_interleaved, "bhsd", "adjacent"),
    (compat.apply_rotary_pos_emb_gpt_oss, "bhsd", "once"),
    (compat.apply_rotary_pos_emb_openai_privacy_filter, "bhsd", "once"),
    (compat.apply_rotary_pos_emb_nanochat, "bhsd", "twice"),
    (compat.apply_rotary_pos_emb_vision, "thd", "twice"),
    (compat.apply_rotary_pos_emb_single, "bhsd", "twice"),
    (compat.apply_rotary_pos_emb_deepseek_v4, "bhsd", "once"),
    (compat.apply_rotary_pos_emb_gptj, "bshd", "sine first"),
    (compat.apply_rotary_emb_llama4, "bshd", "complex"),
    (compat.apply_rotary_emb_deepseek_v2, "bhsd", "complex"),
)


def _convention(theirs: Callable[..., Any]) -> Callable[..., Any] | None:
    """Which of our functions computes the same as theirs, for whole heads and, if theirs supports it, for their first half."""
    for ours, layout, form in _CONVENTIONS:
        wide, narrow = (_rotation_agrees(theirs, ours, layout, form, width) for width in (8, 4))
        if wide is not False and narrow is not False and (wide or narrow):
            return ours
    return None


def _rotation_agrees(theirs: Forward, ours: Forward, layout: str, form: str, width: int) -> bool | None:
    """Whether both give the same result; None if theirs does not accept such tensors."""
    batch, tokens, head_dim = () if layout == "thd" else (2,), 4, 8
    shape = partial(_shape, layout, batch, tokens, head_dim)
    angles = _numbers(*batch, tokens, width // 2)
    if form == "twice":
        angles = torch.cat((angles, angles), -1)
    elif form == "adjacent":
        angles = angles.repeat_interleave(2, -1)
    tables: tuple[Tensor, ...] = angles.cos(), angles.sin()
    if form == "sine first":
        tables = tables[::-1]
    elif form == "complex":
        tables = (torch.complex(*tables),)
    parameters = inspect.signature(ours).parameters
    rotated = _numbers(*shape(3)), _numbers(*shape(2))
    calls: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]] = [((*rotated, *tables), {})]
    if not {"k", "xk"} & parameters.keys():
        calls = [((rotated[0], *tables), {})]
    elif "k" in parameters and parameters["k"].default is None:
        calls.append((rotated[:1], {"cos": tables[0], "sin": tables[1]}))
    try:
        wanted = [y for given, named in calls for y in _flat(theirs(*given, **named))]
    except Exception:  # a foreign function may raise anything
        return None
    try:
        got = [y for given, named in calls for y in _flat(ours(*given, **named))]
    except (TypeError, RuntimeError, ValueError):
        return False
    return len(wanted) == len(got) and all(map(_close, wanted, got))


def _shape(layout: str, batch: tuple[int, ...], tokens: int, head_dim: int, heads: int) -> tuple[int, ...]:
    return (*batch, heads, tokens, head_dim) if layout == "bhsd" else (*batch, tokens, heads, head_dim)


# Gated MLPs


def _gated_forward(module: nn.Module, forward: Forward, save: Save) -> tuple[str, Forward] | str:
    if len(inspect.signature(forward).parameters) != 2:
        return "its forward takes more than one tensor"
    children = dict(module.named_children())
    stacked = "gate_up_proj" in children
    activation = _activation(module, forward, stacked)
    if activation is None:
        return "its forward is no gated MLP with an activation of fusewise"
    kinds = {name: _kind(child) for name, child in children.items() if name in _ACTIVATION_NAMES}

    def gated(self: Any, *x: Tensor, **named: Tensor) -> Tensor:
        (x_D,) = (*x, *named.values())  # positional, or by whatever name the model uses
        if _must_be_called(self, kinds):
            y: Tensor = forward(self, x_D)
            return y
        if stacked:
            both, down = self.gate_up_proj, self.down_proj
            return stacked_mlp(x_D, both, down, activation=activation, gate_first=True, save=save)
        return separate_mlp(x_D, self.gate_proj, self.up_proj, self.down_proj, activation=activation, save=save)

    return f"gated_mlp, {activation}", gated


_ACTIVATION_NAMES = ("act_fn", "activation_fn")


def _kind(activation: nn.Module) -> tuple[type, str | None]:
    """The class of an activation, which a deep copy keeps, and which function it computes, where the class has several (GELU)."""
    return type(activation), known_activation(activation)


def _must_be_called(mlp: Any, kinds: dict[str, tuple[type, str | None]]) -> bool:
    """Whether the activation, of this kind when `patch` was called, was replaced or changed since, or has hooks."""
    return any(
        _kind(getattr(mlp, name)) != kind or not is_untouched(getattr(mlp, name)) for name, kind in kinds.items()
    )


def _activation(module: nn.Module, forward: Forward, stacked: bool) -> Activation | None:
    """The activation with which the gated MLP computes the same as this forward on a module with small projections."""
    x, down = _numbers(5, 4), _numbers(4, 6)
    x[-1] *= 1e4  # beyond the bounds of value or gate that some models have
    gate, up = _numbers(6, 4), _numbers(12, 4)[6:]
    linear = partial(partial, functional.linear)
    small: dict[str, Any] = {"down_proj": linear(weight=down)}
    if stacked:
        small["gate_up_proj"] = linear(weight=torch.cat((gate, up)))
    else:
        small |= {"gate_proj": linear(weight=gate), "up_proj": linear(weight=up)}
    for name in (*_ACTIVATION_NAMES, "config"):
        if hasattr(module, name):
            small[name] = getattr(module, name)
    try:
        wanted = forward(SimpleNamespace(**small), x)
    except Exception:  # as above
        return None
    activations: tuple[Activation, ...] = get_args(Activation)
    for activation in activations:
        if _close(wanted, gated_mlp(x, gate, up, down, activation=activation, impl="reference")):
            return activation
    return None


def _numbers(*shape: int) -> Tensor:
    """Deterministic numbers between -2 and 2, such that any permutation of features changes them; torch's RNG is not used."""
    count = torch.arange(1, 1 + int(torch.Size(shape).numel()), dtype=torch.float64, device="cpu")
    return 2 * torch.sin(count * count).view(shape)


def _close(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5)


def _flat(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _and_more(count: int) -> str:
    return f" and {count} more" if count else ""
