"""Parses the arguments of a user's function from text: `--input "x=bf16[4096,4096]"`.

    [NAME=] DTYPE [ SIZES ] [strides(…)] [randn | randn(MEAN,DEVIATION) | uniform(LOW,HIGH) | randint(LOW,HIGH) | full(VALUE)] [fixed]
    [NAME=] NUMBER | true | false | none | "text"

DTYPE is fp32, f32 or float32, and so on for fp64, bf16, fp16, c64, c128, i64, i32, i16, i8, u8 and bool. Empty SIZES
make a 0-dimensional tensor. Defaults: floating tensors are standard normal, integers in [0, 2) (HIGH is exclusive). A
distribution for a complex tensor applies to both parts. strides(…) are in elements. `fixed` tensors need no gradient.
Arguments without names are positional.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusewise.ops._common import dtype_name, span

from ..errors import parts
from ..names import checksum, nearest
from ..problem import differentiable

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
#: Other spellings: torch's own names, and letters with bits.
ALIASES = {dtype_name(dtype): name for name, dtype in DTYPES.items()} | {
    "f64": "fp64",
    "f32": "fp32",
    "f16": "fp16",
    "float": "fp32",
    "double": "fp64",
    "half": "fp16",
    "short": "i16",
    "int": "i32",
    "long": "i64",
}
_TENSOR = re.compile(r"(?:torch\.)?(?P<dtype>[A-Za-z]\w*)\s*\[(?P<sizes>[^\]]*)\](?P<rest>.*)", re.DOTALL)
_WORD = re.compile(r"\s*(?P<word>[a-z]+)\s*(?:\(\s*(?P<values>[^)]*)\))?")
_NAME = re.compile(r"\s*(?P<name>[^\W\d]\w*)\s*=(?!=)\s*(?P<spec>.*)", re.DOTALL)
#: A tensor of at least MANY values whose statistics are within ERRORS standard errors of a generator's is taken to come
#: from it.
ERRORS, MANY = 4.0, 64
#: The largest HIGH of randint, and value of int64: the double next to 2^63.
LARGEST_HIGH = math.nextafter(2.0**63, 0.0)
_COUNTS = {"randn": (0, 2), "uniform": (2,), "randint": (2,), "full": (1,)}


@dataclass(frozen=True)
class TensorSpec:
    """A description of a tensor."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...] = ()
    fill: str = ""  # randn, uniform, randint, full; "" is the dtype's default
    values: tuple[float, ...] = ()
    fixed: bool = False

    def __str__(self) -> str:
        words = [f"{self.dtype}[{','.join(map(str, self.sizes))}]"]
        if self.strides:
            words.append(f"strides({','.join(map(str, self.strides))})")
        if self.fill:
            words.append(f"{self.fill}({','.join(map(_number, self.values))})" if self.values else self.fill)
        return " ".join([*words, "fixed"] if self.fixed else words)

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * DTYPES[self.dtype].itemsize

    @property
    def real(self) -> torch.dtype:
        """Its dtype, or that of its parts if complex."""
        dtype = DTYPES[self.dtype]
        return dtype.to_real() if dtype.is_complex else dtype

    @property
    def differentiable(self) -> bool:
        return self.real.is_floating_point

    def make(self, device: torch.device, seed: str) -> Tensor:
        """The tensor, drawn on `device` by a generator seeded from `seed`, with its strides."""
        generator = torch.Generator(device).manual_seed(checksum(seed))
        dtype = self.real
        fill = self.fill or ("randn" if self.differentiable else "randint")
        values = self.values or {"randn": (0.0, 1.0), "randint": (0.0, 2.0)}.get(fill, ())
        # strides are applied to contiguous random memory, so that elements may have gaps, repeat and overlap
        sizes = self.sizes if not self.strides or 0 in self.sizes else (span(self.sizes, self.strides),)
        if dtype != DTYPES[self.dtype]:
            sizes = (*sizes, 2)
        x = torch.empty(sizes, device=device, dtype=dtype)
        if fill == "randn":
            x = torch.randn(sizes, generator=generator, device=device, dtype=dtype).mul_(values[1])
            x = x.add_(values[0])
        elif fill == "uniform":
            x.uniform_(*values, generator=generator)
        elif fill == "randint":
            low, high = (int(v) for v in values)
            x = torch.randint(low, high, sizes, generator=generator, device=device).to(dtype)
        else:
            x.fill_(values[0])
        if dtype != DTYPES[self.dtype]:
            x = torch.view_as_complex(x)
        return x.as_strided(self.sizes, self.strides) if self.strides else x


def _number(value: float) -> str:
    """Text that parses back to the value; integers without a decimal point."""
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


Spec = TensorSpec | int | float | bool | str | None


def parse(text: str) -> tuple[str, Spec]:
    """Parse `NAME=SPEC` or `SPEC` into the name ("" if none) and the spec. ValueError naming the violated part of the
    grammar."""
    named = _NAME.fullmatch(text)
    name, spec = (named["name"], named["spec"].strip()) if named else ("", text.strip())
    tensor = _TENSOR.fullmatch(spec)
    if tensor is None:
        return name, _scalar(spec, text)
    dtype = ALIASES.get(tensor["dtype"], tensor["dtype"])
    if dtype not in DTYPES:
        raise _bad(
            text,
            f"have a dtype of {', '.join(DTYPES)}",
            repr(tensor["dtype"]),
            nearest(dtype, [*DTYPES, *ALIASES], "choose one"),
        )
    found = TensorSpec(dtype, _integers(tensor["sizes"], text, "sizes"))
    if found.bytes >= 2**63:
        raise _bad(text, "have less than 2^63 bytes", tensor["sizes"], "make it smaller")
    rest = tensor["rest"]
    while rest.strip():
        word = _WORD.match(rest)
        if word is None:
            raise _bad(text, "be a tensor with words behind it", repr(rest.strip()), 'try "x=fp32[8,8] uniform(-1,1)"')
        found = _with(found, word["word"], word["values"], text)
        rest = rest[word.end() :]
    return name, found


def _with(spec: TensorSpec, word: str, values: str | None, text: str) -> TensorSpec:
    if (spec.fill and word in _COUNTS) or (spec.fixed and word == "fixed") or (spec.strides and word == "strides"):
        raise _bad(text, "tell a thing once", repr(word), "leave one out")
    if word == "fixed" and values is None:
        return replace(spec, fixed=True)
    if word == "strides":
        strides = _integers(values or "", text, "strides")
        if len(strides) != len(spec.sizes):
            raise _bad(text, f"have {len(spec.sizes)} strides", str(len(strides)), "give one for each size")
        if 0 not in spec.sizes and span(spec.sizes, strides) * DTYPES[spec.dtype].itemsize >= 2**63:
            raise _bad(text, "have less than 2^63 bytes", str(values), "give smaller strides")
        return replace(spec, strides=strides)
    if word not in _COUNTS:
        known = ", ".join(("strides", "fixed", *_COUNTS))
        raise _bad(text, f"have words of {known}", repr(word), "choose one")
    try:
        numbers = tuple(map(float, values.split(","))) if values else ()
    except ValueError:
        raise _bad(text, f"have numbers in {word}", repr(values), "write them as 0.5 or 1e-3") from None
    if len(numbers) not in _COUNTS[word]:
        wanted = " or ".join(map(str, _COUNTS[word]))
        raise _bad(text, f"have {wanted} numbers in {word}", str(len(numbers)), "give as many")
    if word in ("randn", "uniform") and not spec.differentiable:
        raise _bad(text, f"be floating for {word}", spec.dtype, "use randint(LOW,HIGH)")
    if any(math.isinf(v) and "inf" not in (values or "").lower() for v in numbers):
        raise _bad(text, f"have numbers in {word} that a float64 has", str(values), "write inf for what has no end")
    if word == "randn" and numbers and not (math.isfinite(numbers[0]) and 0 <= numbers[1] < math.inf):
        raise _bad(text, "have a finite MEAN and DEVIATION >= 0 in randn", str(values), "choose others")
    if word in ("uniform", "randint") and not numbers[0] < numbers[1]:
        raise _bad(text, f"have LOW < HIGH in {word}", str(values), "turn them round")
    if word == "uniform" and not (math.isfinite(width := numbers[1] - numbers[0]) and _holds(spec.dtype, width)):
        raise _bad(
            text, f"have a HIGH - LOW in uniform that is a finite {spec.dtype}", str(values), "bring them closer"
        )
    # The tensor's dtype, and the dtype it is drawn in.
    dtypes = (spec.dtype, "i64") if word == "randint" else (spec.dtype,)
    if not all(_holds(d, v) for d in dtypes for v in _reached(word, numbers)):
        raise _bad(text, f"have numbers in {word} that are some of {spec.dtype}", str(values), "choose others")
    return replace(spec, fill=word, values=numbers)


def _reached(word: str, numbers: tuple[float, ...]) -> tuple[float, ...]:
    """The ends of the drawn range; HIGH of integers is exclusive."""
    return (numbers[0], numbers[1] - 1) if word == "randint" else numbers


def _holds(dtype: str, value: float) -> bool:
    """Whether the dtype can represent the value up to rounding."""
    kind = DTYPES[dtype]
    if kind.is_floating_point or kind.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(kind).max
    low, high = (0, 1) if kind == torch.bool else (torch.iinfo(kind).min, torch.iinfo(kind).max)
    return low <= value <= high and value == int(value)


def _integers(text: str, whole: str, what: str) -> tuple[int, ...]:
    try:
        found = tuple(map(int, text.split(","))) if text.strip() else ()
    except ValueError:
        raise _bad(whole, f"have integers as {what}", repr(text), 'try "x=fp32[128,64]"') from None
    if any(v < 0 for v in found):
        raise _bad(whole, f"have {what} of at least 0", repr(text), "leave out the sign")
    return found


def _scalar(spec: str, text: str) -> Spec:
    words: dict[str, Spec] = {"true": True, "false": False, "none": None}
    if spec.lower() in words:
        return words[spec.lower()]
    if len(spec) >= 2 and spec[0] == spec[-1] and spec[0] in "\"'":
        return spec[1:-1]
    for number in (int, float):
        try:
            return number(spec)
        except ValueError:
            continue
    fix = 'try "x=fp32[1024,1024]"'
    if spec.isidentifier() and spec not in DTYPES and spec not in ALIASES:  # the shell may have removed the quotes
        fix = f"""for a text try '{text.removesuffix(spec)}"{spec}"'"""
    raise _bad(text, "be a tensor, a number, true, false, none or a quoted text", repr(spec), fix)


def _bad(text: str, contract: str, got: str, fix: str) -> ValueError:
    return ValueError(f"study: input {text!r} must {contract}, got {got}; {fix}")


def spec_of(value: Any, fixed_unless_wanted: bool = False) -> Spec:
    """A spec to create a similar argument elsewhere. It never contains the values themselves.

    Floating tensors: normal with the mean and deviation of the finite values, or uniform over their range if none is
    negative; `fixed` if requested and the tensor needs no gradient. Complex tensors: the same for their parts.
    Integers: uniform over their range.
    """
    if not isinstance(value, Tensor):
        if value is None or isinstance(value, bool):
            return value
        for kind in (int, float, str):  # plain values from enums and numpy scalars
            if isinstance(value, kind):
                return kind(value)
        raise TypeError(
            f"study: arguments must be tensors, numbers, texts, bools or None, got {type(value).__name__}; "
            "wrap the function in one that takes its tensors"
        )
    if value.layout != torch.strided or value.is_nested or value.is_meta:
        raise TypeError(
            f"study: tensors must have values and strides, got one of {'meta' if value.is_meta else value.layout}; "
            "pass an ordinary tensor"
        )
    names = {dtype: name for name, dtype in DTYPES.items()}
    if value.dtype not in names:
        raise TypeError(f"study: tensors must be of {', '.join(DTYPES)}, got {value.dtype}; convert it first")
    strides = () if value.is_contiguous() else tuple(value.stride())
    fixed = fixed_unless_wanted and differentiable(value) and not value.requires_grad
    spec = TensorSpec(names[value.dtype], tuple(value.shape), strides, fixed=fixed)
    if value.numel() == 0 or (value.dtype == torch.bool and value.any() and not value.all()):
        return spec
    value = parts(value.detach())
    wide = value.double()
    wide = wide[wide.isfinite()]
    if not wide.numel():
        return replace(spec, fill="full", values=(float(value.flatten()[0]),))
    low, high = wide.min().item(), wide.max().item()
    integers = not value.dtype.is_floating_point
    if low == high:
        return replace(spec, fill="full", values=(min(low, LARGEST_HIGH) if integers else low,))
    if integers:
        return replace(spec, fill="randint", values=(low, min(high + 1, LARGEST_HIGH)))
    most, count = torch.finfo(value.dtype).max, wide.numel()  # rounding to three digits may exceed the maximum
    mean, deviation = wide.mean().item(), wide.std(correction=0).item()
    # Snap to the parameters of torch.randn and torch.rand if they plausibly made the tensor, so that a redraw gets the
    # same name.
    if count >= MANY:
        if abs(mean) <= ERRORS * deviation / math.sqrt(count):
            mean = 0.0
        if abs(deviation - 1) <= ERRORS / math.sqrt(2 * count):
            deviation = 1.0
        if 0 <= low <= 2 * ERRORS / count and 0 <= 1 - high <= 2 * ERRORS / count:
            low, high = 0.0, 1.0
    mean, deviation, low, high = (max(-most, min(most, float(f"{v:.3g}"))) for v in (mean, deviation, low, high))
    if 0 <= low < high:
        return replace(spec, fill="uniform", values=(low, high))
    return spec if (mean, deviation) == (0.0, 1.0) else replace(spec, fill="randn", values=(mean, deviation))


def written(name: str, spec: Spec) -> str:
    """The text that `parse` reads back."""
    if isinstance(spec, bool) or spec is None:
        text = str(spec).lower()
    elif isinstance(spec, str):
        text = f'"{spec}"'
    else:
        text = str(spec) if isinstance(spec, TensorSpec) else repr(spec)
    return f"{name}={text}" if name else text


def bound(names: Sequence[str], texts: Sequence[str]) -> list[tuple[str, Spec]]:
    """The specs in the order of the function's parameters; ValueError for surplus or duplicate inputs."""
    given = [parse(text) for text in texts]
    free = [name for name in names if name not in {n for n, _ in given}]
    found: dict[str, Spec] = {}
    for (name, spec), text in zip(given, texts, strict=True):
        if not name and free:
            name = free.pop(0)
        if name not in names or name in found:
            raise ValueError(
                f"study: inputs must be among the parameters ({', '.join(names)}), each once, got {text!r}; "
                "name another or leave it out"
            )
        found[name] = spec
    return [(name, found[name]) for name in names if name in found]
