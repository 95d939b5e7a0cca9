"""Results must have eager code's dtypes, and gradients those of their inputs; otherwise a provider is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from user_problems import RMS, eager, problem

from fusewise._shared.gpu import tf32_allowed
from fusewise.lab import plan, targets, truth
from fusewise.lab import problem as module_of_problems
from fusewise.lab.plugin import Unsupported, Vjp
from fusewise.lab.problem import Task
from fusewise.lab.providers import xla
from fusewise.lab.targets.user import User

SEVERAL = ("x=fp32[8,16]", "y=fp32[8,16]", "i64[8] randint(0,8)")


def changed(p: Any, number: int, dtype: torch.dtype) -> Any:
    """Eager code with one result cast to another dtype."""
    run = eager(p)

    def call(*xs: Any) -> tuple[Tensor, ...]:
        results = run.leave(run.call(*xs))
        return tuple(y.to(dtype) if i == number else y for i, y in enumerate(results))

    return replace(run, call=call, leave=tuple)


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
def test_a_wider_output_is_wrong_in_every_pass(pass_: Any) -> None:
    """The incoming gradient of a wider output is also wider, so a different backward would be measured."""
    p = problem("rms", *RMS, dtype="bf16", pass_=pass_)
    assert truth.check(p, changed(p, 0, torch.bfloat16)).reason == ""
    found = truth.check(p, changed(p, 0, torch.float32))
    assert found.reason == "the output is float32, eager code's is bfloat16"


@pytest.mark.parametrize(
    ("name", "texts", "number", "dtype", "reason"),
    [
        ("several", SEVERAL, 1, torch.float64, "output 2 of 3 is float64, eager code's is float32"),
        ("several", SEVERAL, 2, torch.int32, "output 3 of 3 is int32, eager code's is int64"),  # as JAX narrows them
        ("torch:signbit", ["fp32[8]"], 0, torch.uint8, "the output is uint8, eager code's is bool"),
        ("spectrum", ["x=fp32[8]"], 0, torch.complex128, "the output is complex128, eager code's is complex64"),
        ("quantized", ["x=fp32[8]"], 0, torch.float32, "output 1 of 2 is float32, eager code's is float8_e4m3fn"),
    ],
)
def test_whatever_kind_of_number_it_is(
    name: str, texts: list[str], number: int, dtype: torch.dtype, reason: str
) -> None:
    p = problem(name, *texts)
    assert truth.check(p, eager(p)).reason == ""
    assert truth.check(p, changed(p, number, dtype)).reason == reason


def test_a_gradient_has_the_dtype_of_what_it_is_of() -> None:
    p = problem("rms", *RMS, dtype="bf16", pass_="bwd")
    run = replace(eager(p), restore=lambda dx, dw: (dx, dw.float()))
    assert truth.check(p, run).reason == "gradient 2 of 2 is float32, its input's dtype is bfloat16"
    assert truth.check(p, eager(p)).reason == ""


def test_gradients_outside_of_autograd_are_held_to_it_too() -> None:
    p = problem("Net", "fp32[3,6]", pass_="fwd+bwd")
    run = eager(p)

    def forward(arguments: tuple[Tensor, ...]) -> tuple[Tensor, Any]:
        xs = tuple(x.requires_grad_() for x in arguments)
        y = run.call(*xs)
        return y, (y, xs)

    def checked(leave: Any) -> str:
        vjp = Vjp(
            forward,
            lambda kept, upstream: p.gradients((kept[0],), kept[1], upstream),
            lambda *_: None,
            lambda upstream: upstream,
            leave,
        )
        return truth.check(p, replace(run, vjp=vjp)).reason

    assert checked(lambda found: found) == ""
    assert checked(lambda found: tuple(g.bfloat16() for g in found)) == (
        "gradient 1 of 3 is bfloat16, its input's dtype is float32"
    )
    assert checked(lambda found: (*found[:2], found[2].double())) == (
        "gradient 3 of 3 is float64, its parameter's dtype is float32"
    )
    assert checked(lambda found: (found[0].flatten(), *found[1:])) == (
        "gradient 1 of 3 has shape (18,), its input's is (3, 6)"
    )
    assert checked(lambda found: (*found[:2], found[2][:1])) == (
        "gradient 3 of 3 has shape (1,), its parameter's is (4,)"
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("op", list(targets.BUILT_IN))
def test_the_gradients_of_a_targets_outputs_have_their_dtypes(op: str, dtype: str) -> None:
    """This gives the output dtypes without running eager code."""
    target = targets.find(op)
    case = min(target.cases(target.default_preset), key=lambda c: c.bytes_min("fwd", dtype))
    p = target.problem(Task(op, case.name, dtype, "fwd", "cpu", 0))
    outputs = p.eager(p.leaves(False))
    assert p.output_dtypes() == tuple(y.dtype for y in outputs) == (getattr(torch, DTYPES[dtype]),) * len(outputs)


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.usefixtures("jax")
def test_jax_gives_gradients_in_the_dtypes_of_what_they_are_of() -> None:
    """Checked before torch's autograd passes them through views of the arguments, which would cast them."""
    import jax

    from fusewise.lab.providers.xla import Jax

    p = targets.problem_for(Task("geglu", "quick-decode", "bf16", "fwd+bwd", "cpu", 0))
    run = Jax().build(p)
    assert run.vjp is not None
    _, kept = run.vjp.forward(run.enter(*p.leaves(False)))
    found = run.vjp.backward(kept, run.vjp.enter(tuple(g for g in p.upstream if g is not None)))
    assert {str(g.dtype) for g in jax.tree_util.tree_leaves(found)} == {"bfloat16"}


@pytest.mark.parametrize(
    ("dtype", "narrow"), [(torch.int64, "int32"), (torch.float64, "float32"), (torch.complex128, "complex64")]
)
def test_jax_gets_64_bits_as_32(jax: Any, dtype: torch.dtype, narrow: str) -> None:
    from fusewise.lab.providers.xla import _array

    assert str(_array(jax, torch.ones(3, dtype=dtype)).dtype) == narrow


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_jax_is_not_given_integers_that_it_would_change(jax: Any, value: int) -> None:
    p = problem("several", *SEVERAL)
    p.tensors[2][0] = value
    with pytest.raises(Unsupported, match="its integers have 32 bits"):
        xla.Jax().build(p)


class Wide(torch.autograd.Function):
    """The backward computes in float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * g.double()


def test_autograd_casts_a_gradient_by_itself() -> None:
    p = problem("doubled", "fp32[8,4]", pass_="bwd")
    assert truth.check(p, replace(eager(p), call=Wide.apply)).reason == ""


@pytest.fixture
def _precision(monkeypatch: Any) -> Any:
    monkeypatch.setattr(module_of_problems, "_own", [])
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def _task(dtype: str, device: str = "cpu") -> Task:
    return Task("geglu", "quick-decode", dtype, "fwd", device, 0)


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize("usual", ["highest", "medium"])
def test_tf32_is_float32_and_lasts_as_long_as_its_task(usual: str) -> None:
    torch.set_float32_matmul_precision(usual)
    for dtype, precision in (("fp32", usual), ("tf32", "high"), ("tf32", "high"), ("bf16", usual), ("fp32", usual)):
        p = targets.problem_for(_task(dtype))
        assert torch.get_float32_matmul_precision() == precision
        assert p.tensors[0].dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
    assert p.bytes_min() == targets.problem_for(_task("tf32")).bytes_min()


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize(("made", "library"), [("highest", "high"), ("highest", "medium"), ("high", "highest")])
def test_eager_code_has_the_precision_of_its_problem_and_a_library_keeps_its_own(
    made: str, library: str, monkeypatch: Any
) -> None:
    torch.set_float32_matmul_precision(made)
    p, seen = targets.problem_for(_task("fp32")), []
    run = p.eager
    monkeypatch.setattr(p, "eager", lambda xs: seen.append(torch.get_float32_matmul_precision()) or run(xs))
    torch.set_float32_matmul_precision(library)
    truth.eagers(p)
    assert {*seen} == {made} and torch.get_float32_matmul_precision() == library


PRECISE = """
import torch
torch.set_float32_matmul_precision("{}")

def product(x):
    return x @ x
"""


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize("own", ["highest", "medium"])
@pytest.mark.parametrize("by", ["file", "module"])
def test_tf32_prevails_over_the_precision_that_a_file_sets(own: str, by: str, tmp_path: Any, monkeypatch: Any) -> None:
    """A file is executed for every task, a module once: either way its own precision is that of the other dtypes."""
    torch.set_float32_matmul_precision("high" if own == "highest" else "highest")
    name = f"sets_{own}"
    (tmp_path / f"{name}.py").write_text(PRECISE.format(own))
    monkeypatch.syspath_prepend(tmp_path)
    target = User(f"{tmp_path / name}.py:product" if by == "file" else f"{name}:product", ["fp32[4,4]"])
    for dtype, precision in (("tf32", "high"), ("fp32", own), ("tf32", "high"), ("bf16", own)):
        case = target.case()
        targets.problem_for(Task(target.name, case.name, dtype, "fwd", "cpu", 0, target.detail(case)))
        assert torch.get_float32_matmul_precision() == precision


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize(("setting", "allowed"), [("ieee", False), ("tf32", True)])
def test_torch_s_newer_settings_are_this_process_s_own(setting: str, allowed: bool, jax: Any) -> None:
    """After which torch refuses to tell the older one."""
    torch.backends.cuda.matmul.fp32_precision = setting
    for dtype, expected in (("fp32", allowed), ("tf32", True), ("fp32", allowed)):
        p = targets.problem_for(_task(dtype))
        assert (p.tf32, tf32_allowed()) == (expected, expected)
        xla._jax(p)
        assert jax.config.jax_default_matmul_precision == ("high" if expected else "highest")


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize("own", ["highest", "high"])
def test_a_library_that_changes_the_precision_changes_neither_eager_code_nor_the_next_task(own: str) -> None:
    torch.set_float32_matmul_precision(own)
    other = "high" if own == "highest" else "highest"
    p = targets.problem_for(_task("fp32"))
    usual, seen = p.eager, []
    p.eager = lambda leaves: (seen.append(torch.get_float32_matmul_precision()), usual(leaves))[1]  # type: ignore[method-assign]

    def call(*xs: Any) -> Any:
        torch.set_float32_matmul_precision(other)
        return usual(xs)

    call(*p.tensors)  # as where a library is imported
    assert truth.check(p, replace(eager(p), call=call)).reason == ""
    assert {*seen} == {own}
    assert torch.get_float32_matmul_precision() == other
    targets.problem_for(_task("fp32"))
    assert torch.get_float32_matmul_precision() == own


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize(("precision", "of_jax"), [("highest", "highest"), ("high", "high"), ("medium", "high")])
def test_jax_multiplies_in_torch_s_precision(precision: str, of_jax: str, jax: Any) -> None:
    torch.set_float32_matmul_precision(precision)
    xla._jax(targets.problem_for(_task("fp32")))
    assert jax.config.jax_default_matmul_precision == of_jax


@pytest.mark.usefixtures("_precision")
def test_a_function_of_16_bit_inputs_gets_float32_for_tf32() -> None:
    p = problem("rms", "x=bf16[8,16]", "weight=bf16[16]", dtype="tf32")
    assert {x.dtype for x in p.tensors} == {torch.float32}


def test_tf32_is_for_matmuls_on_a_gpu(monkeypatch: Any, tmp_path: Any) -> None:
    refused = r"dtype must be one of fp32, bf16, fp16, got 'tf32' \(tf32 is for matmuls on a GPU\); choose one"
    with pytest.raises(ValueError, match=refused):
        plan.options(plan.Request(target="geglu", dtypes=["tf32"], device="cpu"), tmp_path)
    monkeypatch.setattr(plan, "device", lambda _: "cuda:0")
    with pytest.raises(ValueError, match=refused):
        plan.options(plan.Request(target="rope", dtypes=["tf32"]), tmp_path)
    asked = plan.Request(target="geglu", cases=["shapes-aligned"], dtypes=["fp32", "tf32"], providers=["eager"])
    found = plan.options(asked, tmp_path)
    assert {task.dtype for task in found.tasks} == {"fp32", "tf32"}


@pytest.mark.parametrize("name", ["geglu", "gated_mlp", "gelu"])
def test_cases_move_as_many_bytes_in_tf32(name: str) -> None:
    """Those of GELU are what a target of one's own may use."""
    for case in (target := targets.find(name)).cases(target.default_preset):
        for pass_ in case.passes:
            assert case.bytes_min(pass_, "tf32") == case.bytes_min(pass_, "fp32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("_precision")
def test_products_round_in_tf32_alone() -> None:
    """Both are checked against float64 with eager code's own error in the same precision."""
    error = {}
    for dtype in ("fp32", "tf32"):
        p = targets.problem_for(_task(dtype, "cuda:0"))
        found = truth.check(p, eager(p))
        assert found.reason == ""
        error[dtype] = found.eager.worst
    assert error["tf32"] > 20 * error["fp32"]
