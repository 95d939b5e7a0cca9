"""The Gluon kernel source in the simulator against the reference; asynchronous operations complete as late or as early as allowed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from fusewise.ops.gated_linear import _gluon, _gluon_few, reference
from fusewise.ops.gated_linear._problem import ACTIVATIONS, Halves, Spec, new_preact, split_preact

_path = Path(__file__).with_name("gluon_machine.py")
_spec = importlib.util.spec_from_file_location("gluon_machine", _path)
assert _spec is not None and _spec.loader is not None
gluon_machine = sys.modules.setdefault("gluon_machine", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(gluon_machine)

STACKED = Spec("gelu_tanh", "stacked")
EAGER: dict[str, Any] = {
    "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"), "gelu": functional.gelu, "silu": functional.silu,
    "relu": functional.relu, "sigmoid": torch.sigmoid, "identity": lambda g: g,
}  # fmt: skip
# (M, D, F): one tile and less than a K step; ragged in every dimension, several passes through the ring buffer; several row tiles.
SHAPES = [(1, 8, 8), (150, 328, 136), (300, 64, 264)]


def operands(rows: int, features: int, hidden: int, spec: Spec, bias: bool = True) -> tuple[Tensor, Halves, Tensor]:
    x = torch.randn(rows, features, dtype=torch.bfloat16)
    weight = (torch.randn(2 * hidden, features) / features**0.5).bfloat16()
    b = torch.randn(2 * hidden, dtype=torch.bfloat16) if bias else None
    return x, Halves.of(spec, weight, None, b), torch.randn(rows, hidden, dtype=torch.bfloat16)


def run(
    epilogue: str, x: Tensor, value: Tensor, gate: Tensor | None, hidden: int, spec: Spec, programs: int, timing: str,
    config: _gluon.Config | None = None, **tensors: Any,
) -> None:  # fmt: skip
    config = config or _gluon.choose(epilogue)
    given = {"y": None, "outputs": (None, None), "inputs": (None, None), "bias": (None, None), "sums": None, **tensors}
    arrivals = torch.zeros(1, dtype=torch.int32) if config.in_step else None
    grid, arguments = _gluon.arguments(
        x,
        value,
        gate,
        config,
        programs,
        epilogue=epilogue,
        activation=spec.activation,
        hidden=hidden,
        arrivals=arrivals,
        **given,
    )
    gluon_machine.launch("gated_linear_kernel", grid, arguments, timing)
    if arrivals is not None:  # once for each tile
        assert arrivals == -(-x.shape[0] // 128) * -(-hidden // _gluon.columns(epilogue))


def close(found: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
    """Check within one rounding; unwritten (NaN) elements fail."""
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-2, atol=1e-2 + tolerance)


# Every epilogue with every ring buffer length and separate outputs, and the one that may overwrite its inputs.
CALLS = [(e, c, False) for e in ("y", "preact", "gradient", "down") for c in _gluon.configurations(e) if c.group_m == 8]
CALLS.append(("down", _gluon.choose("down"), True))


@pytest.mark.parametrize("timing", ["early", "late", "mixed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("epilogue", "config", "in_place"), CALLS, ids=str)
def test_every_epilogue(
    epilogue: str, config: _gluon.Config, in_place: bool, shape: tuple[int, int, int], timing: str
) -> None:
    rows, features, hidden = shape
    x, halves, dy = operands(rows, features, hidden, STACKED)
    y, expected_y = torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16), torch.empty_like(dy)
    preact, expected = new_preact(x, hidden, STACKED).fill_(torch.nan), new_preact(x, hidden, STACKED)
    sums = torch.full((-(-rows // 64), 2, hidden), torch.nan)
    dbias = torch.empty(2, hidden)
    programs = 2  # several tiles each
    bias = (halves.value_bias, halves.gate_bias)
    if epilogue == "gradient":
        run(
            "gradient", x, halves.value, halves.gate, hidden, STACKED, programs, timing, config, inputs=(dy, None),
            outputs=split_preact(preact, STACKED), bias=bias, sums=sums,
        )  # fmt: skip
        reference.recompute_gradient(dy, x, halves, expected, STACKED, dbias)
    elif epilogue == "down":
        before = torch.randn_like(preact)
        if in_place:
            preact.copy_(before)
            given = preact
        else:
            given = before
        w_down = halves.value.mT.contiguous()
        run(
            "down", x, w_down, None, hidden, STACKED, programs, timing, config, y=y, inputs=split_preact(given, STACKED),
            outputs=split_preact(preact, STACKED), sums=sums,
        )  # fmt: skip
        reference.down_gradient(x, w_down, before, expected_y, expected, STACKED, dbias)
    else:
        outputs = split_preact(preact, STACKED) if epilogue == "preact" else (None, None)
        run(
            epilogue, x, halves.value, halves.gate, hidden, STACKED, programs, timing, config, y=y, outputs=outputs, bias=bias
        )  # fmt: skip
        reference.forward(x, halves, STACKED, expected_y, expected)
    if epilogue != "gradient":
        close(y, expected_y)
    if epilogue != "y":
        close(preact, expected)
    if epilogue not in ("y", "preact"):
        # Sums of stored values: each term is rounded to bfloat16, an error of at most half an ulp.
        terms = torch.stack([part.float().abs().sum(0) for part in split_preact(expected, STACKED)])
        assert ((sums.sum(0) - dbias).abs() <= 2**-8 * terms + 1e-6).all()


@pytest.mark.parametrize("layout", ["stacked", "interleaved"])
@pytest.mark.parametrize("shape", [(150, 84, 136), (150, 81, 135), (70, 72, 129), (5, 81, 135)], ids=str)
def test_what_tma_cannot_describe_is_copied(shape: tuple[int, int, int], layout: Any, monkeypatch: Any) -> None:
    """Rows of x, weight, y and pre-activations that are not aligned to 16 bytes, through the implementation's own functions;
    memory next to the outputs is unchanged."""
    monkeypatch.setattr(_gluon, "processors_of", lambda _: 2)
    monkeypatch.setattr(
        _gluon, "_start", lambda kernel, *rest: gluon_machine.launch(kernel.fn.__name__, *rest[-1](), "mixed")
    )
    monkeypatch.setattr(_gluon, "_add_up", lambda sums, dbias: torch.sum(sums, 0, out=dbias))
    rows, features, hidden = shape
    spec = Spec("gelu_tanh", layout)
    x, halves, dy = operands(rows, features, hidden, spec)
    w_down = torch.randn(features, hidden).bfloat16() / features**0.5
    results = []
    for module in (_gluon, reference):
        whole = torch.full((rows + 2, hidden), 7.0, dtype=torch.bfloat16)
        y, kept_y, down_y = whole[1:-1].fill_(torch.nan), torch.empty_like(dy), torch.empty_like(dy)
        kept, remade, down = (new_preact(x, hidden, spec).fill_(torch.nan) for _ in range(3))
        dbias, down_dbias = torch.full((2, hidden), torch.nan), torch.full((2, hidden), torch.nan)
        module.forward(x, halves, spec, y, None)
        module.forward(x, halves, spec, kept_y, kept)
        module.recompute_gradient(dy, x, halves, remade, spec, dbias)
        for of, source in ((u, dy) for u in split_preact(down, spec)):
            of.copy_(source)
        module.down_gradient(x, w_down, down, down_y, down, spec, down_dbias)
        assert bool((whole[0] == 7.0).all() and (whole[-1] == 7.0).all())
        results.append((y, kept_y, kept, remade, down_y, down))
        sums = torch.stack((dbias, down_dbias))
        if module is _gluon:
            found_sums = sums
    for found, expected in zip(*results, strict=True):
        close(found, expected)
    torch.testing.assert_close(found_sums, sums, rtol=2e-2, atol=0.2)  # sums of values rounded to bfloat16


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    """The gate and its gradient, in the matmul epilogue and alone, with large and small gates; no bias."""
    spec = Spec(activation, "stacked", gate_first=True)
    rows, features, hidden = 70, 72, 136
    x, halves, dy = operands(rows, features, hidden, spec, bias=False)
    x = x * torch.logspace(-2, 1, rows)[:, None].bfloat16()
    y, preact = torch.full_like(dy, torch.nan), new_preact(x, hidden, spec).fill_(torch.nan)
    run("preact", x, halves.value, halves.gate, hidden, spec, 4, "mixed", y=y, outputs=split_preact(preact, spec))
    expected_y, expected = torch.empty_like(dy), torch.empty_like(preact)
    reference.forward(x, halves, spec, expected_y, expected)
    close(y, expected_y)
    close(preact, expected)
    dpreact, dbias, sums = (
        torch.full_like(preact, torch.nan),
        torch.empty(2, hidden),
        torch.full((9, 2, hidden), torch.nan),
    )
    config = _gluon.GateConfig(8, 4, 64)
    grid, arguments = _gluon.gate_arguments(
        dy, split_preact(preact, spec), split_preact(dpreact, spec), config, activation, sums
    )
    gluon_machine.launch("gate_gradient_kernel", grid, arguments)
    reference.gradient(dy, preact, expected, spec, dbias)
    close(dpreact, expected)
    close(sums.sum(0), dbias, 1e-2)
    total = torch.full_like(dbias, torch.nan)
    gluon_machine.launch(
        "add_up_kernel",
        -(-2 * hidden // 64),
        {"sums_ptr": sums, "to_ptr": total, "R": 9, "WIDTH": 2 * hidden, "BLOCK_R": 4},
    )
    torch.testing.assert_close(total, sums.sum(0))


@pytest.mark.parametrize("epilogue", ["preact", "gradient", "down"])
def test_nothing_is_written_beside_the_outputs(epilogue: str) -> None:
    """Outputs inside larger matrices, and a row of sums after the last."""
    rows, features, hidden = 150, 72, 136
    x, halves, dy = operands(rows, features, hidden, STACKED)

    def within(columns: int) -> tuple[Tensor, Tensor]:
        whole = torch.full((rows + 2, columns + 16), 7.0).bfloat16()
        part = whole[1:-1, 8:-8]
        part.fill_(torch.nan)
        return whole, part

    (whole_y, y), (whole_preact, preact) = within(hidden), within(2 * hidden)
    sums = torch.full((4, 2, hidden), torch.nan)
    sums[-1] = 7.0
    bias = (halves.value_bias, halves.gate_bias)
    outputs = (preact[:, :hidden], preact[:, hidden:])
    if epilogue == "preact":
        run("preact", x, halves.value, halves.gate, hidden, STACKED, 2, "mixed", y=y, outputs=outputs, bias=bias)
    elif epilogue == "gradient":
        run(
            "gradient", x, halves.value, halves.gate, hidden, STACKED, 2, "mixed", inputs=(dy, None), outputs=outputs,
            bias=bias, sums=sums[:3],
        )  # fmt: skip
    else:
        run(
            "down", x, halves.value.mT.contiguous(), None, hidden, STACKED, 2, "mixed", y=y, inputs=(dy, dy.flip(0)),
            outputs=outputs, sums=sums[:3],
        )  # fmt: skip
    assert bool((sums[-1] == 7.0).all())
    for whole, part, written in ((whole_y, y, epilogue != "gradient"), (whole_preact, preact, True)):
        assert not written or not part.isnan().any()
        part.fill_(7.0)
        assert bool((whole == 7.0).all())


SPECIALS = [0.0, -0.0, 1.0, -1.0, 30.0, -30.0, 1e5, -1e5, 1e10, -1e10, 1e20, -1e20, 3e38, -3e38, torch.inf, -torch.inf, torch.nan]  # fmt: skip


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # whichever flag is set
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinities_and_nan_are_those_of_eager(activation: str) -> None:
    """Special values, gates and gradients, one per column: y from a zero weight and a bias, the gradient from memory."""
    spec = Spec(activation, "stacked")
    triples = [(u, g, dy) for u in (1.0, 0.0, -2.0, 1e20, torch.inf, torch.nan) for g in SPECIALS for dy in (1.0, 0.0, torch.inf)]  # fmt: skip
    triples += [(1.0, 1.0, 1.0)] * (-len(triples) % 8)
    u, g, dy = (torch.tensor(column).bfloat16()[None] for column in zip(*triples, strict=True))
    hidden = u.shape[1]
    x, weight = torch.zeros(1, 8).bfloat16(), torch.zeros(2 * hidden, 8).bfloat16()
    halves = Halves.of(spec, weight, None, torch.cat((u[0], g[0])))
    y, preact = torch.zeros_like(u), torch.cat((u, g), 1)
    run(
        "y", x, halves.value, halves.gate, hidden, spec, 1, "early", y=y, bias=(halves.value_bias, halves.gate_bias)
    )  # fmt: skip
    value, gate = (t.float().requires_grad_() for t in (u, g))
    # oneDNN's GELU gives NaN for +∞, and ∞ for 3e38; torch's own does not.
    with torch.backends.mkldnn.flags(enabled=False):
        usual = value * EAGER[activation](gate)
        expected = torch.autograd.grad(usual, (value, gate), dy.float())
    torch.testing.assert_close(y, usual.detach().bfloat16(), equal_nan=True)
    dpreact = torch.zeros_like(preact)
    config = _gluon.choose_gate(1, hidden, 132, sums=False)
    grid, arguments = _gluon.gate_arguments(
        dy, split_preact(preact, spec), split_preact(dpreact, spec), config, activation, None
    )
    gluon_machine.launch("gate_gradient_kernel", grid, arguments)
    torch.testing.assert_close(dpreact, torch.cat(expected, 1).bfloat16(), equal_nan=True, rtol=2e-2, atol=1e-5)


FEW = [  # (M, D, F), configuration, programs
    ((1, 328, 136), _gluon_few.Config(56, 1, 3), 2),
    ((16, 256, 264), _gluon_few.Config(112, 2, 2), 2),
    ((5, 64, 8), _gluon_few.Config(8, 1, 3), 2),
    ((64, 200, 384), _gluon_few.Config(96, 1, 4), 3),
    ((33, 520, 128), _gluon_few.Config(128, 2, 2), 1),
    ((3, 136, 200), _gluon_few.Config(24, 2, 5), 4),
    ((100, 200, 136), _gluon_few.Config(64, 1, 6), 2),
    ((70, 200, 136), _gluon_few.Config(48, 1, 6), 2),
]


@pytest.mark.parametrize("timing", ["early", "late", "mixed"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "config", "programs"), FEW, ids=str)
def test_few_rows(
    shape: tuple[int, int, int], config: _gluon_few.Config, programs: int, bias: bool, timing: str
) -> None:
    rows, features, hidden = shape
    x, halves, _ = operands(rows, features, hidden, STACKED, bias)
    whole = torch.full((rows + 2, hidden), 7.0).bfloat16()
    y, expected = whole[1:-1].fill_(torch.nan), torch.empty(rows, hidden).bfloat16()
    grid, arguments = _gluon_few.arguments(
        x,
        halves.value,
        halves.gate,
        (halves.value_bias, halves.gate_bias),
        y,
        config,
        programs,
        "gelu_tanh",
        _gluon._map,
    )
    gluon_machine.launch("few_rows_kernel", grid, arguments, timing)
    reference.forward(x, halves, STACKED, expected, None)
    close(y, expected)
    assert bool((whole[0] == 7.0).all() and (whole[-1] == 7.0).all())


def test_a_bias_of_infinity_makes_no_sums_beyond_the_last_row() -> None:
    rows, features, hidden = 70, 64, 64
    x, halves, dy = operands(rows, features, hidden, STACKED)
    assert halves.gate_bias is not None
    halves.gate_bias[3] = torch.inf
    preact, sums, dbias = new_preact(x, hidden, STACKED), torch.full((2, 2, hidden), torch.nan), torch.empty(2, hidden)
    run(
        "gradient", x, halves.value, halves.gate, hidden, STACKED, 1, "late", inputs=(dy, None),
        outputs=split_preact(preact, STACKED), bias=(halves.value_bias, halves.gate_bias), sums=sums,
    )  # fmt: skip
    reference.recompute_gradient(dy, x, halves, torch.empty_like(preact), STACKED, dbias)
    others = torch.arange(hidden) != 3
    close(sums.sum(0)[:, others], dbias[:, others], 0.1)
    assert sums.sum(0)[0, 3].isinf() or sums.sum(0)[0, 3].isnan() == dbias[0, 3].isnan()


@pytest.mark.parametrize(
    ("epilogue", "old", "new"),
    [
        ("y", "mbarrier.arrive(free.index(last), count=1, pred=step > 0)", "mbarrier.arrive(free.index(slot), count=1)"),
        ("y", "slots.index(p).store(y.to(slots.dtype))", "slots.index(0).store(y.to(slots.dtype))"),
        ("y", "mbarrier.wait(turns.index(GROUP), before)", "pass"),
        ("preact", "tma.store_wait(pendings=0)  # of the piece before", "pass"),
    ],
    ids=["block given back early", "one slot for two pieces", "no turns at the products", "slots written early"],
)  # fmt: skip
def test_the_machine_sees_a_race(epilogue: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing or too early synchronization gives wrong numbers or a deadlock. Only missing turns at the store slots are
    not detected: here an epilogue is much shorter than a product, so two never overlap."""
    kernel = gluon_machine._gluon_kernel
    source = Path(str(kernel.__file__)).read_text()
    assert old in source
    broken: dict[str, Any] = {}
    plain = source.replace(old, new).replace("@gluon.jit\n", "")
    for name in ("_multiply", "_consume"):
        start = plain.index(f"def {name}(")
        exec(plain[start : plain.index("\n\n\n", start)], vars(kernel).copy(), broken)
        monkeypatch.setattr(kernel, name, type("Broken", (), {"fn": staticmethod(broken[name])}))
    monkeypatch.setattr(gluon_machine, "PATIENCE", 2.0)
    x, halves, _ = operands(256, 640, 256, STACKED)
    y, expected = torch.full((256, 256), torch.nan, dtype=torch.bfloat16), torch.empty(256, 256, dtype=torch.bfloat16)
    preact, expected_preact = new_preact(x, 256, STACKED), new_preact(x, 256, STACKED)
    reference.forward(x, halves, STACKED, expected, expected_preact)
    outputs = (None, None) if epilogue == "y" else split_preact(preact, STACKED)
    bias = (halves.value_bias, halves.gate_bias)

    def launch_and_compare() -> None:
        for _ in range(10):  # a race may be won
            run(epilogue, x, halves.value, halves.gate, 256, STACKED, 1, "late", y=y, outputs=outputs, bias=bias)
            close(y, expected)
            if epilogue == "preact":
                close(preact, expected_preact)

    with pytest.raises((AssertionError, RuntimeError), match=r"deadlock|not close|more arrived"):
        launch_and_compare()
