"""The real compilers on small problems of every target, each in its own process, in one study."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fusewise.lab import plugin, study, targets
from fusewise.lab.options import Options
from fusewise.lab.problem import Task
from fusewise.lab.targets.user import User

FILE = str(Path(__file__).with_name("user_functions.py"))
WRITERS = str(Path(__file__).with_name("user_writers.py"))
PACKAGES = {
    "thunder": "lightning-thunder", "thunder-torchcompile": "lightning-thunder", "jax": "jax", "tvm": "apache-tvm",
}  # fmt: skip
COMPILERS = ["torchscript", "torch.compile", "thunder", "thunder-torchcompile", "jax", "tvm"]


def here(provider):
    """Whether the provider's package is installed."""
    try:
        return provider not in PACKAGES or bool(importlib.metadata.version(PACKAGES[provider]))
    except importlib.metadata.PackageNotFoundError:
        return False


#: From torch 2.14 on, Thunder 0.2.6 and torchax 0.0.13 cannot be imported.
TOO_NEW = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
#: User functions reach JAX through torchax, which may be missing even if JAX is installed.
BRIDGE = (importlib.util.find_spec("torchax") is not None and not TOO_NEW) or sys.version_info < (3, 11)
NO_BRIDGE = "import torchax.export failed: ModuleNotFoundError: No module named 'torchax'; pip install 'fusewise[lab]'"


class Silent:
    def __getattr__(self, name):
        return lambda *_: None


def user_task(name, pass_, *texts):
    target = User(name if ":" in name else f"{FILE}:{name}", texts)
    case = target.case()
    return Task(target.name, case.name, case.dtypes[0], pass_, "cpu", 0, target.detail(case))


TASKS = [
    Task("gelu", "gelu-5x5", "fp32", "fwd", "cpu", 0),
    Task("rope", "cube-8", "fp32", "bwd", "cpu", 0),
    user_task("rms", "fwd+bwd", "x=bf16[8,32]", "weight=bf16[32]", "eps=1e-5"),
    user_task("Net", "bwd", "fp32[3,6]"),
    user_task("several", "fwd", "x=fp32[4,8]", "y=fp32[4,8]", "i64[4] randint(0,4)"),
]
CLAMPING = user_task(f"{WRITERS}:Clamping", "fwd", "fp32[8,4]")
#: What each compiler cannot do, with the words of its row's reason.
CANNOT = {
    ("jax", "user_functions.py:several", "fwd"): "takes only outputs with a gradient",
    **{("tvm", task.op, task.pass_): "has no backward" for task in TASKS if task.pass_ != "fwd"},
}
if sys.version_info < (3, 11):
    CANNOT |= {("jax", t.op, t.pass_): "torchax needs Python 3.11" for t in TASKS if t.op.startswith("user_functions")}


def studied(options, again=False):
    """The record of a study; `again`: with long first calls repeated in second processes, which takes as long again."""
    found = study.Study(options, Silent())
    if not again:
        found.begun_again = []
    return found.run()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("compilers")
    options = Options(
        op="all", tasks=[*TASKS, CLAMPING], providers=plugin.select(["eager", *COMPILERS], "gelu", "cpu"), device="cpu", out=out,
        warm=True, min_rounds=3, max_rounds=3, twin=False,
    )  # fmt: skip
    made = studied(options)
    return {(r.provider, r.op, r.pass_): r for r in made.rows}, made


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=lambda t: f"{t.op.split(':')[-1]}-{t.pass_}")
@pytest.mark.parametrize("provider", ["eager", *COMPILERS])
def test_a_compiler_is_right_or_says_that_it_cannot(rows, provider, task):
    row = rows[0][provider, task.op, task.pass_]
    words = CANNOT.get((provider, task.op, task.pass_))
    if not here(provider):
        assert (row.status, "is not installed; pip install" in row.reason) == ("missing", True)
    elif TOO_NEW and "does not work here" in row.reason:
        assert row.status == "missing"
        pytest.skip(row.reason)
    elif provider == "jax" and task.op.startswith("user_functions") and not BRIDGE:
        assert (row.status, row.reason) == ("missing", NO_BRIDGE)
        pytest.skip(row.reason)
    elif words:
        assert (row.status, words in row.reason) == ("missing", True), row.reason
    else:
        assert row.status == "ok", row.reason
        assert row.device_us > 0
        assert row.error <= 2 * row.error_eager + torch.finfo(torch.bfloat16).eps / 2


#: Covers complex numbers, whose gradients JAX conjugates, and modules whose parameters are shared or frozen.
GRADIENTS = [
    user_task(name, pass_, *texts)
    for name, texts in {
        "with_words": ("x=fp32[4,8]",), "conjugated": ("z=c64[4,8]", "x=fp32[4,8]"), "turned": ("x=bf16[4,8]",), "Complex": ("x=fp32[3,4]",), "Tied": ("fp32[3,6]",),
    }.items()
    for pass_ in ("bwd", "fwd+bwd")
]  # fmt: skip
#: torch.export drops detach, so JAX differentiates the rounding, too.
STRAIGHT_THROUGH = user_task("rounded_straight_through", "bwd", "x=fp32[4,8]")
#: TVM's importer computes all products in float32; JAX has no float64 by default.
DTYPES = [user_task("torch:mm", "fwd", "bf16[8,16]", "bf16[16,4]"), user_task("doubled_in_float64", "fwd", "fp32[8]")]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Rows of JAX and TVM, whose imports take as long as the rest: one study for both of the tests below."""
    options = Options(
        op="all", tasks=[*GRADIENTS, STRAIGHT_THROUGH, *DTYPES], providers=plugin.select(["tvm", "jax"], "my.py:f", "cpu"), device="cpu",
        out=tmp_path_factory.mktemp("exported"), warm=True, min_rounds=3, max_rounds=3, twin=False,
    )  # fmt: skip
    return studied(options).rows


@pytest.mark.slow
@pytest.mark.skipif(not here("jax") or not BRIDGE or sys.version_info < (3, 11), reason="no JAX, or no bridge to it")
def test_gradients_of_jax_are_those_of_pytorch(exported):
    *rows, other = [row for row in exported if row.provider == "jax" and row.pass_ != "fwd"]
    assert [(row.status, row.reason) for row in rows] == [("ok", "")] * 10
    assert other.op == STRAIGHT_THROUGH.op
    assert other.status == "wrong"
    assert "if it has detach, torch.no_grad or a torch.autograd.Function: torch.export drops them" in other.reason


@pytest.mark.slow
def test_a_compiler_that_gives_another_dtype_is_wrong_and_says_so(exported):
    found = {
        (row.provider, row.op.split(":")[1]): (row.status, row.reason, row.device_us)
        for row in exported
        if row.pass_ == "fwd"
    }
    if here("tvm"):
        assert found["tvm", "mm"] == ("wrong", "the output is float32, eager code's is bfloat16", None)
        assert found["tvm", "doubled_in_float64"][0] == "ok"
    if here("jax") and BRIDGE and sys.version_info >= (3, 11):
        assert found["jax", "mm"][0] == "ok"
        reason = "the output is float32, eager code's is float64"
        assert found["jax", "doubled_in_float64"] == ("wrong", reason, None)


@pytest.mark.slow
def test_a_compiler_that_leaves_out_a_write_to_a_parameter_is_wrong(rows):
    """torch.export returns it as an extra output, which providers built on it do not write back."""
    found = {row.provider: (row.status, row.reason) for row in rows[1].rows if row.op == CLAMPING.op}
    assert {found[name] for name in ("eager", "torchscript", "torch.compile")} == {("ok", "")}
    wrong = ("wrong", "it does not write to the parameter frozen")
    if here("tvm"):
        assert found["tvm"] == wrong
    if here("jax") and BRIDGE and sys.version_info >= (3, 11):
        assert found["jax"] == wrong


@pytest.mark.slow
def test_memory_is_known_of_what_torch_allocates_and_of_nothing_else(rows):
    found, _ = rows
    assert found["eager", "user_functions.py:rms", "fwd+bwd"].held_bytes > 0
    for name in ("jax", "tvm"):
        row = found[name, "gelu", "fwd"]
        assert (row.peak_bytes, row.held_bytes) == (None, None)


@pytest.mark.slow
def test_versions_of_the_compilers_are_in_their_rows(rows):
    for name, package in PACKAGES.items():
        if here(name):
            assert package in rows[0][name, "gelu", "fwd"].versions


def test_nvfuser_is_a_row_with_its_reason():
    (entry,) = plugin.select(["thunder-nvfuser"], "gelu", "cuda:0")
    with pytest.raises(plugin.Missing, match=r"nvfuser is not installed; .* no wheel for a later torch"):
        entry.provider.check("cuda:0")


def test_thunder_leaves_no_stand_ins_behind():
    from fusewise.lab.providers.thunder import named_tensor_methods

    before = dir(torch.Tensor)
    with named_tensor_methods():
        assert torch.Tensor.align_as.__name__ == "align_as"
    assert dir(torch.Tensor) == before


def test_which_modes_are_measured_by_default():
    def names(op, device):
        return {e.name for e in plugin.select(None, op, device)}

    assert "torch.compile-max-autotune" in names("geglu", "cuda:0")
    assert "torch.compile-max-autotune" not in names("geglu", "cpu") | names("rope", "cuda:0")
    assert "torch.compile-reduce-overhead" not in names("geglu", "cuda:0")
    assert {"floor-matmul", "quack-stacked"} <= names("geglu", "cuda:0")
    assert not {"floor-matmul", "flash_attn"} & names("gelu", "cuda:0")
    assert set(COMPILERS) <= names("my.py:f", "cpu")
    assert set(COMPILERS) - names("rope", "cpu") == {"thunder-torchcompile"}


@pytest.mark.usefixtures("jax")
@pytest.mark.parametrize("op", ["rope", "gelu", "geglu"])
def test_every_target_is_written_in_jax_too(op):
    target = targets.find(op)
    case = target.cases(target.default_preset)[0]
    problem = target.problem(Task(op, case.name, "fp32", "fwd", "cpu", 0))
    assert callable(problem.jax())


@pytest.mark.slow
def test_a_long_first_call_is_repeated_in_a_second_process(tmp_path):
    options = Options(
        op="all", tasks=[CLAMPING], providers=plugin.select(["eager", "torch.compile"], "my.py:f", "cpu"), device="cpu",
        out=tmp_path, warm=True, min_rounds=3, max_rounds=3, twin=False,
    )  # fmt: skip
    again = {row.provider: row.first_call_again_s for row in studied(options, again=True).rows}
    assert again["torch.compile"] > 0 and again["eager"] is None
