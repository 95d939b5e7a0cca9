"""RotaryEmbedding: a module that holds the frequencies or tables of `fusewise.rope`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..ops._common import MAX_POSITION, as_int, check_count, check_one_of, exporting, fail, known
from ..ops.rope import rope, tables
from ..ops.rope._auto import IMPLEMENTATIONS
from ..ops.rope._problem import LAYOUTS, PAIRINGS, Layout, Pairing, layout_dims
from ..ops.rope._validate import DEFAULTS, validated


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of q, or of q and k in one launch, with the frequencies of any published model.

    It has no parameters and adds nothing to the state_dict. Casting the module (`.to(torch.bfloat16)`, `.half()`) moves
    its buffers but never rounds them, and a module built on the meta device has correct values after `to_empty`.

    Args:
        head_dim: features of a head, even.
        rotary_dim: number of rotated features; None: the whole head. `rotary_start` is the first of them; negative
            values count from the end of the head.
        base: `rope_theta`.
        rope_type: "default", "linear", "dynamic", "yarn", "longrope", "llama3" or "proportional"; `parameters` are the
            other arguments of the function of that name in `fusewise.ops.rope.tables` (factor, seq_len, ...).
        pairing, layout, sections, sections_interleaved, impl: as in `fusewise.rope`.
        table: "inv_freq": P frequencies and no table, angles computed in the kernel for any position. "cos_sin": float32
            tables, created on the device of q by the first call.
        max_positions: rows of the tables that the first call creates. Default positions (no `positions`, `cu_seqlens`
            or offset tensor) beyond them create new tables with at least twice the rows; position ids cannot be
            inspected without a device synchronization, so they must be below max_positions, or the length given to
            `reserve`. Tables used by a CUDA graph, a compiled graph, an exported program or a `torch.jit` trace should be
            reserved beforehand.
        device: initial device of the frequencies; None: the default device.

    The frequencies of "dynamic" and "longrope" depend on the sequence length. They are those of `seq_len` at
    construction and only change by `use_length`: cached keys remain valid with the frequencies that they were rotated with.

    Under torch.compile the default, "inv_freq", neither breaks the graph nor recompiles when the length varies.

    Raises:
        TypeError, ValueError: at construction `RotaryEmbedding: …` for options and sizes and `rope_tables: …` for the
            frequencies; at a call as `fusewise.rope`.

    Example:
        >>> rotary = RotaryEmbedding(64, base=500000.0)
        >>> q, k = rotary(torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64))
    """

    inv_freq: Tensor
    cos: Tensor | None
    sin: Tensor | None

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_dim: int | None = None,
        rotary_start: int = 0,
        base: float = 10000.0,
        rope_type: str = "default",
        pairing: Pairing = "half",
        layout: Layout = "bshd",
        sections: tuple[int, int, int] | None = None,
        sections_interleaved: bool = False,
        table: Literal["inv_freq", "cos_sin"] = "inv_freq",
        max_positions: int = 2048,
        impl: str = "auto",
        device: torch.device | str | None = None,
        **parameters: Any,
    ) -> None:
        super().__init__()
        for name, value, allowed in (
            ("table", table, ("inv_freq", "cos_sin")), ("layout", layout, LAYOUTS), ("pairing", pairing, PAIRINGS),
        ):  # fmt: skip
            check_one_of("RotaryEmbedding", name, value, allowed)
        self.head_dim = check_count("RotaryEmbedding", "head_dim", head_dim)
        self._whole = rotary_dim is None
        self.rotary_dim = check_count("RotaryEmbedding", "rotary_dim", self.head_dim if self._whole else rotary_dim)
        self.base, self.rope_type, self.rope_arguments = base, rope_type, parameters
        self.table, self.max_positions = table, check_count("RotaryEmbedding", "max_positions", max_positions)
        self.options: dict[str, Any] = {
            "pairing": pairing,
            "layout": layout,
            "rotary_dim": self.rotary_dim,
            "rotary_start": as_int(rotary_start),
            "sections": sections,
            "sections_interleaved": sections_interleaved,
            "impl": impl,
        }
        check_one_of("RotaryEmbedding", "impl", impl, ("auto", *IMPLEMENTATIONS))
        self._frequencies, self.scaling = self._computed()
        self._check_options()
        self._reserved = 0
        for name in ("inv_freq", "cos", "sin"):
            self.register_buffer(name, None, persistent=False)
        self._restore(torch.get_default_device() if device is None else device)

    def _check_options(self) -> None:
        """Validate the options at construction, by validating a call with one token."""
        sizes = {"B": 1, "T": 1, "H": 1, "D": self.head_dim}
        dims = {"bshd": "BTHD", "sbhd": "TBHD", "bhsd": "BHTD", "thd": "THD"}[self.options["layout"]]
        q = torch.zeros([sizes[dim] for dim in dims], device="cpu")
        positions = None if self.options["sections"] is None else torch.zeros(3, 1, dtype=torch.int64, device="cpu")
        options = {**self.options, "inv_freq": self._frequencies.cpu(), "positions": positions, "impl": "auto"}
        validated("RotaryEmbedding", q, None, tuple({**DEFAULTS, **options}.values()))

    @classmethod
    def from_config(cls, config: Any, *, layer_type: str | None = None, **options: Any) -> RotaryEmbedding:
        """The module for a model configuration: any object with transformers' attributes; of a multimodal model its
        `text_config` (or `vision_config`).

        Reads `head_dim` (or hidden_size / num_attention_heads), `qk_rope_head_dim` and `qk_nope_head_dim` (DeepSeek:
        the trailing part rotates, of `head_dim` if the second is missing), `rope_interleave`, `rope_parameters` or the
        older `rope_scaling`, `rope_theta` or `rotary_emb_base`, `partial_rotary_factor` or `rotary_pct`,
        `max_position_embeddings`, `original_max_position_embeddings`. Otherwise a configuration does not specify the
        pairing: pass `pairing="interleaved"` for a model that rotates adjacent features (GLM, Cohere).

        Args:
            layer_type: selects one of the `rope_parameters` if there is one per layer type (Gemma 3 and 4), and the
                dimensions if the configuration has them per layer.
            options: constructor arguments that take precedence (`head_dim` if it differs between layers).

        Raises:
            TypeError: `config` is a mapping or a module.
            ValueError: it has no head width, `rope_parameters` has no such `layer_type`, or its mrope_section has an order
                that `sections` does not (ERNIE 4.5 VL).
        """
        # Neither has the attributes: the frequencies would be the defaults.
        if isinstance(config, (Mapping, nn.Module)):
            contract = "be an object with transformers' attributes"
            fail("RotaryEmbedding", "config", contract, type(config).__name__, "pass model.config", TypeError)
        parameters = dict(_first(config, "rope_parameters", "rope_scaling") or {})
        layered = len(parameters) > 0 and all(isinstance(value, Mapping) for value in parameters.values())
        if layered or layer_type is not None:
            if not isinstance(parameters.get(layer_type), Mapping):
                raise ValueError(
                    f"RotaryEmbedding: layer_type must be a key of rope_parameters with a mapping, got {layer_type!r}; "
                    f"use {'one of ' + ', '.join(parameters) if layered else None}"
                )
            parameters = dict(parameters[layer_type])
            if getattr(config, "is_heterogeneous", False):  # layers also differ in other fields
                config = config.per_layer_config[config.layer_types.index(layer_type)]
        flat = not any(isinstance(value, Mapping) for value in parameters.values())
        if flat:
            for key, names in _OUTSIDE.items():
                if parameters.get(key) is None and (value := _first(config, *names)) is not None:
                    parameters[key] = value
            if (original := _first(config, "original_max_position_embeddings")) is not None:
                parameters["original_max_position_embeddings"] = original
        rotated_part = _first(config, "qk_rope_head_dim")
        head_dim = options.pop("head_dim", None) or _first(config, "head_dim")
        width, heads = _first(config, "hidden_size"), _first(config, "num_attention_heads")
        of_text = _first(config, "text_config") is not None
        if (width is None or heads is None) and (of_text or not head_dim):
            contract = "have head_dim, or hidden_size and num_attention_heads"
            fix = "pass its text_config" if of_text else "pass head_dim="
            fail("RotaryEmbedding", "config", contract, f"{type(config).__name__} without", fix)
        head_dim = head_dim or width // heads
        longest = _first(config, "max_position_embeddings")
        arguments = tables.arguments_from_config(
            parameters, rotated_part or head_dim, options.pop("seq_len", None), max_position_embeddings=longest
        )
        if rotated_part is not None:
            # partial_rotary_factor, if present, is relative to the whole head.
            arguments["rotary_dim"], arguments["rotary_start"] = rotated_part, -rotated_part
            if (fixed_part := _first(config, "qk_nope_head_dim")) is not None:
                head_dim = rotated_part + fixed_part
            if _first(config, "rope_interleave"):
                arguments["pairing"] = "interleaved_to_half"
        if (sections := parameters.get("mrope_section")) is not None:
            if str(_first(config, "model_type")).startswith("ernie4_5_vl"):
                raise ValueError(
                    "RotaryEmbedding: mrope_section must be of consecutive pairs, or of the three axes in turn, got that of "
                    f"{config.model_type}, where height and width alternate; use the model's own tables"
                )
            arguments["sections"] = tuple(sections)
            arguments["sections_interleaved"] = bool(parameters.get("mrope_interleaved"))
        if longest is not None:
            arguments["max_positions"] = longest
        return cls(**{"head_dim": head_dim, **arguments, **options})

    def forward(
        self,
        q: Tensor,
        k: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        context_parallel: tuple[int, int] | None = None,
        inverse: bool = False,
    ) -> Any:
        """The rotated q, or (q, k) if there is a k. Arguments as in `fusewise.rope`."""
        arguments = self.arguments(
            q, positions, offset=offset, cu_seqlens=cu_seqlens, context_parallel=context_parallel
        )
        return rope(q, k, **arguments, inverse=inverse)

    def arguments(
        self,
        q: Tensor,
        positions: Tensor | None = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        context_parallel: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        """The keyword arguments of `fusewise.rope` for q: frequencies, or tables on its device that cover its positions."""
        offset = as_int(offset)
        dense = isinstance(q, Tensor) and not q.is_nested  # anything else is rejected by `fusewise.rope`
        if self._whole and dense and q.dim() > 0 and q.shape[-1] != self.head_dim:
            raise ValueError(
                f"RotaryEmbedding: q must have heads of head_dim = {self.head_dim} features, got {q.shape[-1]}; make the module for "
                f"those, or with rotary_dim={self.head_dim} where a part of them rotates"
            )
        given: dict[str, Any] = {
            "positions": positions,
            "offset": offset,
            "cu_seqlens": cu_seqlens,
            "context_parallel": context_parallel,
            **self.options,
        }
        if self.table == "inv_freq":
            # By getattr, as Thunder's proxies have no `is_meta`; by `device` it would take longer.
            if isinstance(q, Tensor) and getattr(q, "is_meta", False) != getattr(self.inv_freq, "is_meta", False):
                self._restore(q.device)  # the model was created on the meta device
            return {"inv_freq": self.inv_freq, "scale": self.scaling, **given}
        if dense:  # other invalid arguments are reported by `fusewise.rope`
            rows, dim = self.max_positions, layout_dims(self.options["layout"])[1]
            if positions is None and cu_seqlens is None and isinstance(offset, int) and q.dim() > dim:
                rows = offset + q.shape[dim] * _ranks(context_parallel)
            cos, sin = self._cover(rows, q.device)
        else:
            cos, sin = self.cos, self.sin
        return {"cos": cos, "sin": sin, **given}

    def reserve(self, length: int, device: torch.device | str | None = None) -> None:
        """Make the tables of "cos_sin" cover positions below `length` on `device` (None: that of the frequencies).

        If they do not, new ones are created with the maximum of `max_positions`, `length` and twice the old rows. The
        old ones are not modified. Tables recreated later, on another device or after `use_length`, cover at least as much.

        Raises:
            TypeError, ValueError: `length` is not an int from 0 to 2^31 - 1.
        """
        if device is not None:
            device = torch.empty(0, device=device).device  # resolves "cuda" to an index, as tables have one
        length = check_count("RotaryEmbedding", "length", length, 0, MAX_POSITION)
        self._cover(length, device)
        self._reserved = max(self._reserved, length)  # only after the tables could be created

    def _cover(self, length: int, device: torch.device | None) -> tuple[Any, Any]:
        """Tables that cover `length`. The attributes are read once: another thread may be replacing them by larger tables."""
        cos: Any = self.cos
        sin: Any = self.sin
        wanted = self.inv_freq.device if device is None else device
        # An export replaces the table by a fake tensor; one left behind by a trace that has ended is unusable.
        left = isinstance(cos, torch._subclasses.FakeTensor) and cos.fake_mode is not torch._guards.detect_fake_mode()
        whole = cos is not None and sin is not None and cos.shape == sin.shape
        rows = cos.shape[0] if whole and not left and cos.device == sin.device == wanted else 0
        if self.table == "cos_sin" and known(rows < max(length, 1)):
            rows = max(length, self.max_positions, self._reserved, 2 * rows)
            with torch.inference_mode(False):  # as in `_computed`
                cos, sin = tables.cos_sin(self._frequencies, rows, scaling=self.scaling, device=wanted)
            if not exporting():  # an export ends in an error if a buffer changes; the program computes these tables
                self.cos, self.sin = cos, sin
        return cos, sin

    def use_length(self, seq_len: int) -> None:
        """Use the frequencies of "dynamic" or "longrope" for sequences of `seq_len` tokens; the other types have one
        set for all lengths. Tables are recreated by the next call."""
        if self.rope_type in ("dynamic", "longrope"):
            before, self.rope_arguments = self.rope_arguments, {**self.rope_arguments, "seq_len": seq_len}
            try:
                self._frequencies, self.scaling = self._computed()
            except BaseException:
                self.rope_arguments = before
                raise
            self._restore(self.inv_freq.device)

    def extra_repr(self) -> str:
        words = [str(self.head_dim)]
        if self.rotary_dim != self.head_dim:
            words += [f"rotary_dim={self.rotary_dim}", f"rotary_start={self.options['rotary_start']}"]
        words += [f"base={self.base:g}", f"rope_type={self.rope_type!r}"]
        words += [f"{name}={self.options[name]!r}" for name in ("pairing", "layout")]
        return ", ".join([*words, f"table={self.table!r}"])

    def _computed(self) -> tuple[Tensor, float]:
        with torch.inference_mode(False):  # later calls may need gradients
            return tables.inv_freq(self.rope_type, rotary_dim=self.rotary_dim, base=self.base, **self.rope_arguments)

    def _restore(self, device: torch.device | str) -> None:
        with torch.inference_mode(False):
            self.inv_freq = self._frequencies.to(device)
        self.cos = self.sin = None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RotaryEmbedding:
        # `.to`, `.half`, `.to_empty` etc. call this: follow the device, keep the values.
        self.cos = self.sin = None
        if self.inv_freq.is_meta:  # meta tensors have nothing to copy
            self._restore("cpu")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._restore(self.inv_freq.device)
        return self


def _ranks(context_parallel: Any) -> int:
    """The number of context-parallel ranks; 1 if the argument is invalid."""
    pair = isinstance(context_parallel, (tuple, list)) and len(context_parallel) == 2
    ranks = as_int(context_parallel[1]) if pair else 1
    return ranks if isinstance(ranks, int) else 1


# Keys of rope_parameters that older configurations store outside of it, and their names there.
_OUTSIDE = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
