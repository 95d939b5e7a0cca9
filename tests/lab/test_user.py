"""User functions: called on arguments made from text, checked against themselves in float64. Where they come from is in
test_user_places.py and test_user_python.py, what is counted of them in test_user_counts.py.
"""

from dataclasses import replace

import pytest
import torch
from user_problems import COMPILED, FILE, RMS, WRITERS, eager, problem

from fusewise.lab import plugin, truth
from fusewise.lab.plugin import Run
from fusewise.lab.problem import Exportable, Task
from fusewise.lab.providers.pytorch import TorchScript
from fusewise.lab.targets.user import User
from fusewise.lab.targets.user_problem import VERIFY, UserProblem

SEVERAL = ("x=fp32[8,16]", "y=fp32[8,16]", "i64[8] randint(0,8)")


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("rms", RMS),
        ("several", SEVERAL),
        ("Net", ("fp32[3,6]",)),
        ("Lazy", ("fp32[3,6]",)),
        ("Lazy", ("bf16[3,6]",)),
        ("scripted", ("fp32[3,4]",)),
        ("scripted", ("bf16[3,4]",)),
        ("weight_normed", ("fp32[3,4]",)),
        ("weight_normed", ("bf16[3,4]",)),
        (f"{COMPILED}:of_torch_compile", ("fp32[3,4]",)),
    ],
)
def test_a_function_agrees_with_itself_in_float64(name, texts, pass_):
    p = problem(name, *texts, dtype=texts[0].split("[")[0].removeprefix("x="), pass_=pass_)
    verdict = truth.check(p, eager(p))
    assert verdict.reason == ""
    assert 0 < verdict.errors.max < 0.02


def test_the_truth_computes_in_float64_whatever_the_function_says():
    """`rms` casts to float32 and back; its truth must not compute in float32."""
    p = problem("rms", "x=fp32[64,128]", "weight=fp32[128]")
    (true,) = p.truth(p.leaves(False, wide=True))
    x, weight = (t.double() for t in p.tensors)
    exact = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    assert true.dtype == torch.float64
    assert torch.allclose(true, exact, rtol=1e-14, atol=0)
    assert torch.get_default_dtype() == torch.float32


def test_a_wrong_gradient_of_a_parameter_is_found():
    p = problem("Net", "fp32[3,6]", pass_="bwd")
    assert len(p.parameters) == 2
    run = eager(p)
    bias = p.function.linear.bias

    def call(x):
        return run.call(x) + 0.05 * (bias - bias.detach())

    assert "more than twice" in truth.check(p, Run(call, run.enter, run.leave)).reason


def test_a_gradient_may_be_rounded_to_its_parameter():
    p = problem("Narrow", "fp32[64,4]", pass_="bwd")
    exact = truth.Yardstick(truth.Errors(0.0, 0.0))  # eager code may be exact by luck
    assert truth.within(truth.Errors(2**-9, 2**-9), exact, p.dtype)
    assert truth.check(p, eager(p)).reason == ""
    assert problem("Net", "fp32[3,6]").dtype == torch.float32


def test_an_index_is_right_or_wrong_whatever_the_dtype():
    p = problem("arg_largest", "x=bf16[4,4096]", dtype="bf16")
    assert truth.check(p, eager(p)) == truth.Verdict(truth.Errors(0.0, 0.0, 0, 4), truth.Errors(0.0, 0.0, 0, 4), "")
    beside = truth.check(p, replace(eager(p), call=lambda x: x.argmax(-1) + torch.tensor([0, 0, 1, 0])))
    assert beside.reason.startswith("1 of 4 integers differ from float64's, 0 of eager's do; among equal values")
    assert beside.errors.worst == 0.25


@pytest.mark.parametrize(
    ("found", "of_eager", "right"), [(0, 0, True), (1, 0, False), (5, 1, True), (6, 1, False), (230, 100, True)]
)
def test_so_many_integers_may_be_others(found, of_eager, right):
    yardstick = truth.Yardstick(truth.Errors(0.0, 0.0, of_eager, 10**4))
    assert truth.within(truth.Errors(0.0, 0.0, found, 10**4), yardstick, torch.float32) == right
    assert not truth.within(truth.Errors(0.0, 0.0, 9000, 10**4), yardstick, torch.float32)


def test_large_integers_hide_no_error_of_small_numbers_beside_them():
    p = problem("with_large_integers", "x=fp32[8]")
    assert truth.check(p, eager(p)).reason == ""
    double = replace(eager(p), call=lambda x: (x * 2e-9, torch.arange(10**6, 10**6 + 4)))
    assert "more than twice" in truth.check(p, double).reason


def test_a_function_that_comes_back_in_two_processes_is_refused():
    with pytest.raises(ValueError, match="must return in the process that called it, got a second one that it forked"):
        problem("comes_back_twice", "x=fp32[4]")
    p = problem("forks", "x=fp32[4]")
    assert truth.check(p, eager(p)).reason == ""


def test_a_backward_that_raises_is_told_with_its_own_reason():
    with pytest.raises(NotImplementedError, match="no gradient on Tuesdays"):
        problem("without_gradient", "x=fp32[4]", pass_="bwd")


def test_integers_that_are_random_are_refused():
    with pytest.raises(ValueError, match="must give the same result when called again"):
        problem("torch:randint_like", "fp32[64]", "100")


def test_a_gradient_that_is_zero_but_for_rounding_is_right():
    p = problem("Normalized", "fp32[16,8]", pass_="bwd")  # that of the bias, which the normalization removes
    assert truth.check(p, eager(p)).reason == ""


def test_modules_have_the_same_parameters_in_every_process():
    first, again, other = (problem("Net", "fp32[3,6]", seed=s) for s in (0, 0, 1))
    assert torch.equal(first.parameters[0], again.parameters[0])
    assert not torch.equal(first.parameters[0], other.parameters[0])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "texts", "flops", "elements"),
    [
        ("of_scores", ["fp32[1,2,128,16]"] * 3, 2 * (2 * 2 * 128 * 128 * 16), 4 * 2 * 128 * 16),  # dense, regardless of the mask
        ("either", ["fp32[8,16]"], 0, 2 * 8 * 16),
        ("either_product", ["fp32[8,8]"], 2 * 8**3, 2 * 8 * 8),
        (f"{COMPILED}:compiled_inside", ["fp32[3,6]", "fp32[6,4]"], 2 * 3 * 6 * 4, 3 * 6 + 6 * 4 + 3 * 4 // 2),  # to bfloat16
    ],
)  # fmt: skip
def test_functions_that_hold_functions_or_compile_by_themselves(name, texts, flops, elements):
    p = problem(name, *texts)
    assert (p.flops_min(), p.bytes_min()) == (flops, 4 * elements)
    for _ in range(2):
        assert truth.check(p, eager(p)).reason == ""
    wide = p.truth(p.leaves(False, wide=True))[0]
    assert wide.dtype == torch.float64
    if name.endswith("compiled_inside"):
        x, weight = (t.double() for t in p.tensors)
        assert torch.equal(wide, (x @ weight).relu())  # nothing was computed in bfloat16


@pytest.mark.parametrize("pass_", ["bwd", "fwd+bwd"])
def test_a_function_that_holds_functions_has_a_backward(pass_):
    p = problem("either", "fp32[8,16]", pass_=pass_)
    for _ in range(2):
        assert truth.check(p, eager(p)).reason == ""
    (x,) = p.leaves(True, wide=True)
    gradient = p.gradients(p.truth((x,)), (x,), p.upstream, wide=True)[0]
    slope = x.cos() if x.sum() > 0 else -x.sin()
    assert gradient.dtype == torch.float64 and torch.equal(gradient, p.upstream[0].double() * slope)


def test_a_function_that_compiles_itself_can_be_compiled_after_it_was_looked_at():
    """Under a dispatch mode, as for eager code's results, Dynamo takes what it sees for code not to compile."""
    p = problem(f"{COMPILED}:compiled_inside", "fp32[3,6]", "fp32[6,4]")
    compiled = torch.compile(p.function, backend="eager", fullgraph=True)
    assert truth.check(p, Run(compiled)).reason == ""


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_a_function_may_give_dataclasses(pass_):
    p = problem("dataclasses_of", "x=fp32[4]", pass_=pass_)
    assert p.output_shapes() == ((4,), (4,), ())
    assert truth.check(p, eager(p)).reason == ""
    assert len(Exportable(p.function, p.tensors)(*p.tensors)) == 3


def test_a_sparse_gradient_is_refused():
    texts = ["table=fp32[100,8]", "index=i64[4]"]
    assert problem("sparse_gradient", *texts).bytes_min() > 0
    with pytest.raises(ValueError, match=r"must have dense gradients, got a torch.sparse_coo one; make it dense"):
        problem("sparse_gradient", *texts, pass_="bwd")


def test_a_function_may_give_eight_bits():
    for pass_ in ("fwd", "bwd"):
        p = problem("quantized", "x=fp32[8,16]", pass_=pass_)
        assert truth.check(p, eager(p)).reason == ""


def test_a_long_case_is_told_from_another_by_a_name_that_a_record_can_have():
    cases = [User(f"{FILE}:rms", ["fp32[4]", *["2.5"] * 2000, last]).case() for last in ("1.0", "2.0")]
    assert [len(case.name) for case in cases] == [1000, 1000]
    assert cases[0].name != cases[1].name
    assert User(f"{FILE}:rms", ["fp32[4]"]).case().name == "fp32[4]"


@pytest.mark.parametrize("strides", ["0,1", "1,1", "40,2", "1,8", "3,0"])
def test_measured_on_the_strides_that_were_asked_for(strides):
    p = problem("doubled", f"x=fp32[8,16] strides({strides})")
    wanted = tuple(map(int, strides.split(",")))
    for tensors in (p.tensors, p.leaves(False), p.leaves(True), p.leaves(False, wide=True)):
        assert tensors[0].stride() == wanted
        assert torch.equal(tensors[0].float(), p.tensors[0])
    assert p.leaves(False)[0].data_ptr() != p.tensors[0].data_ptr()
    assert truth.check(p, eager(p)).reason == ""


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_tensors_that_a_function_has_from_elsewhere_are_in_float64_for_the_truth(pass_):
    p = problem("projected", "x=fp32[8,8]", pass_=pass_)
    verdict = truth.check(p, eager(p))
    assert verdict.reason == ""
    assert 0 < verdict.errors.max < 1e-6


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_a_function_may_give_nan_and_infinity(pass_):
    p = problem("logarithm", "x=fp32[64]", pass_=pass_)
    assert p.eager(p.leaves(False))[0].isnan().any()
    assert truth.check(p, eager(p)).reason == ""


def test_nan_among_the_inputs_is_not_an_overwritten_input():
    p = problem("doubled", "x=fp32[4] full(nan)")
    assert truth.check(p, eager(p)).reason == ""


def test_both_parts_of_complex_results_are_checked():
    p = problem("spectrum", "x=fp32[8]")
    assert truth.check(p, eager(p)).reason == ""
    assert "more than twice" in truth.check(p, Run(lambda x: torch.fft.fft(x).conj())).reason
    real = truth.check(p, Run(lambda x: torch.fft.fft(x).real)).reason
    assert real == "the output is float32, eager code's is complex64"


COMPLEX = [
    ("spectrum", ["x=fp32[8]"]),
    ("conjugated", ["z=c64[4,8] strides(1,4)", "x=fp32[4,8]"]),
    ("turned", ["x=bf16[4,8]"]),
    ("modulus", ["z=c64[8]"]),
    ("Complex", ["x=fp32[3,4]"]),
]


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize(("name", "texts"), COMPLEX)
def test_complex_numbers_have_gradients_like_real_ones(name, texts, pass_):
    p = problem(name, *texts, dtype="bf16" if name == "turned" else "fp32", pass_=pass_)
    assert all(x.dtype in (torch.float64, torch.complex128) for x in truth.expected(p)[0])
    verdict = truth.check(p, eager(p))
    assert verdict.reason == ""
    assert 0 < verdict.errors.max < 0.02


def test_a_complex_gradient_is_that_of_pytorch():
    """For upstream g of y = w z it is conj(w) g; one without the conjugate is wrong."""
    p = problem("conjugated", "z=c64[8]", "x=fp32[8]", pass_="bwd")
    (z, x), (g,) = p.tensors, p.upstream
    assert g.is_complex()
    w = (1 + 2j) * x
    true = (torch.real(w.conj() * g) * 2 * z, torch.real(g * ((1 + 2j) * z * z.conj()).conj()))
    for found, right in zip(truth.expected(p)[0], true, strict=True):
        assert torch.allclose(found.to(right.dtype), right, rtol=1e-5)

    def backwards(found):
        return (found[0].conj(), found[1])

    run = eager(p)
    wrong = Run(run.call, run.enter, run.leave, restore=lambda *found: backwards(found))
    assert "more than twice" in truth.check(p, wrong).reason


def test_which_dtype_a_study_is_of():
    def first(*texts):
        return User(f"{FILE}:conjugated", texts).case()

    assert (first("c64[8]", "bf16[8]").dtypes, first("c64[8]", "bf16[8]").passes) == (("bf16",), ("fwd", "bwd"))
    assert (first("c64[8]").dtypes, first("c64[8] fixed").passes) == (("fp32",), ("fwd",))
    p = problem("conjugated", "fp64[8]", "fp32[8]")
    assert [x.dtype for x in p.tensors] == [torch.float64, torch.float32]
    p = problem("conjugated", "c64[8]", "fp32[8]", dtype="bf16")
    assert [x.dtype for x in p.tensors] == [torch.complex64, torch.bfloat16]
    with pytest.raises(ValueError, match="dtype must be fp32 where no input is of fp32, bf16, fp16, got 'bf16'; leave"):
        problem("modulus", "c64[8]", dtype="bf16")
    with pytest.raises(ValueError, match=r"HIGH - LOW in uniform that is a finite fp16, got -100000,100000; bring"):
        problem("doubled", "x=fp32[8] uniform(-1e5,1e5)", dtype="fp16")


def test_a_narrow_dtype_leaves_a_modules_complex_numbers():
    p = problem("Complex", "x=bf16[3,4]", dtype="bf16")
    assert p.function.weight.dtype == p.function.turn.dtype == torch.complex64
    assert p.wide.weight.dtype == p.wide.turn.dtype == torch.complex128


def test_arguments_without_names_and_between_those_given():
    assert problem("of_everything", "fp32[4]", "fp32[4]", "2").arguments == [None, None, 2]
    p = problem("scaled", "x=fp32[4]", "mode='other'")
    assert p.arguments == [None, 2.0, True, "other"]
    with pytest.raises(ValueError, match=r"must be among the parameters \(x, scale, flag, mode\)"):
        problem("scaled", "x=fp32[4]", "bias=1.0")


@pytest.mark.parametrize(
    ("place", "texts"), [("torch:softmax", ("fp32[4,4]", "1")), ("torch.nn.functional:gelu", ("fp32[4]",))]
)
def test_functions_not_written_in_python(place, texts):
    target = User(place, texts)
    p = UserProblem(Task(target.name, "c", "fp32", "fwd", "cpu", 0, target.detail(target.case())))
    assert truth.check(p, eager(p)).reason == ""


def test_a_fixed_input_gets_no_gradient():
    p = problem("rms", "x=fp32[8,16]", "weight=fp32[16] fixed", pass_="bwd")
    assert [x.requires_grad for x in p.leaves(True)] == [True, False]
    assert truth.check(p, eager(p)).reason == ""


def test_the_dtype_of_a_task_replaces_that_of_the_first_input():
    p = problem("several", *SEVERAL, dtype="bf16")
    assert [x.dtype for x in p.tensors] == [torch.bfloat16, torch.bfloat16, torch.int64]


@pytest.mark.parametrize(
    ("name", "texts", "pass_", "words"),
    [
        ("noisy", ("fp32[64]",), "fwd", "must give the same result when called again"),
        ("faintly_noisy", ("fp32[64]",), "fwd", "must give the same result when called again"),
        ("hardly_noisy", ("fp32[64]",), "fwd", "must give the same result when called again"),
        ("of_random_size", ("fp32[1000]",), "fwd", "must give the same result when called again"),
        ("nothing", ("fp32[4]",), "fwd", "must return a tensor, .* got NoneType; return one"),
        ("number", ("fp32[4]",), "fwd", "must return a tensor, .* got float; return one"),
        ("by_keyword", ("fp32[4]",), "fwd", "must take its arguments by position, got width, height by keyword only"),
        ("by_keyword", ("fp32[4]", "depth=2"), "fwd", "by position, got width, height, depth by keyword only; wrap it"),
        ("rms", ("fp32[4]",), "fwd", "must be given for every parameter without a default, got none for weight; give"),
        (
            "doubled",
            ("x=fp32[1000000,1000000,1000]",),
            "fwd",
            r"input 'x=fp32\[1.*\]' must be one that memory has room for",
        ),
        ("whole", ("fp32[4]",), "bwd", "must be differentiable for a backward pass; ask for fwd alone"),
        ("rms", ("eps=1e-3", "x=fp32[4]"), "fwd", "must leave out no parameter before the last one given"),
        ("overwrites", ("fp32[4]",), "fwd", "must leave its inputs as they are"),
        ("squeezes", ("fp32[1,4]",), "fwd", "must leave its inputs as they are"),
        ("resizes", ("fp32[8,8]",), "fwd", "must leave its inputs as they are"),
        ("torch:softmax", ("input=fp32[8,8]", "dim=1"), "fwd", "must be without names where a function does not tell"),
        (
            "Sized",
            ("fp32[4]",),
            "fwd",
            r"must be a module that is made without arguments, got .*'width'; name an instance",
        ),
        ("Called", ("fp32[4]",), "fwd", "must be a function or module, got the class Called; name an instance"),
        ("sparse", ("fp32[4]",), "fwd", "must return tensors with values and strides, got a torch.sparse_coo one"),
        ("without_values", ("fp32[4]",), "fwd", "must return tensors with values and strides, got a meta one"),
        ("missing", ("fp32[4]",), "fwd", "missing must be defined at the top of .*, got no such name; check its name"),
        ("dubled", ("fp32[4]",), "fwd", "dubled must be defined at the top of .*, got no such name; try 'doubled'"),
        ("not_a_function", ("fp32[4]",), "fwd", "must be a function or module, got int"),
    ],
)
def test_what_cannot_be_studied_says_why(name, texts, pass_, words):
    with pytest.raises(ValueError, match=words):
        problem(name, *texts, pass_=pass_)


def test_what_follows_from_the_dtype_is_something_else_in_the_truth():
    p = problem("masked", "fp32[4,8]")
    assert "the error overflows float64; eager code gives another result in float64" in truth.check(p, eager(p)).reason


def test_a_function_of_bits_has_no_truth():
    p = problem("magnitude_of_bits", "fp32[4]")
    with pytest.raises(
        ValueError, match=r"must give results of the same shapes in float64, .* got \(\(8,\),\) for \(\(4,\),\)"
    ):
        truth.check(p, eager(p))


def test_a_function_that_refuses_float64_has_no_truth():
    p = problem("asserts", "fp32[4]")
    with pytest.raises(ValueError, match=r"must run on float64 tensors, too, .* got AssertionError: only float32"):
        truth.check(p, eager(p))


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("shifted", ["fp32[3,4]", "fp32[4]"]),
        ("shifted", ["fp32[3,4]", "fp32[4]", "none"]),
        ("shifted", ["fp32[3,4]", "2.5"]),
        ("shifted", ["fp32[3,4]", "fp32[4]", "fp32[4]"]),
        ("tripled", ["fp32[3,4]"]),
        ("called", ["fp32[3,4]"]),  # an object
        ("plus_one", ["fp32[3,4]"]),  # a decorated function, which is scripted without its decorator
        ("PlusOne", ["fp32[3,4]"]),
        ("halved", ["fp32[3,4]"]),  # a method, which is scripted without its object
        ("Parametrized", ["fp32[3,6]"]),
    ],
)
def test_what_torchscript_takes_for_a_tensor_is_traced(name, texts):
    p = problem(name, *texts)
    assert truth.check(p, TorchScript().build(p)).reason == ""


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("quantised", ["x=fp32[8,16]"]),
        ("through_numpy", ["x=fp32[8,16]"]),
        ("by_sign", ["x=fp32[8,16]"]),  # a branch
        ("by_sign", ["x=fp32[8,16] uniform(0,1)"]),
        ("kept_of_rows", ["x=fp32[8,16]", "i64[1] full(7)"]),  # a length
        ("kept_of_rows", ["x=fp32[8,16]", "i64[4] randint(2,8)"]),
    ],
)
def test_a_trace_with_values_of_its_inputs_is_no_provider(name, texts):
    with pytest.raises(plugin.Unsupported, match="a trace keeps values of the inputs as constants"):
        TorchScript().build(problem(name, *texts))


def test_a_trace_of_a_mask_is_a_provider():
    """Bools that are looked up stay bools where a trace is tried on other values."""
    p = problem("above_or_masked", "x=fp32[8,16]", "bool[8,16]")
    assert truth.check(p, TorchScript().build(p)).reason == ""


def test_what_is_returned_beside_tensors_is_nothing_to_export():
    p = problem("with_words", "x=fp32[8,16]")
    (x,) = p.tensors
    result = Exportable(p.program().function, (x,))(x)
    assert [type(y) for y in result] == [torch.Tensor] * 2
    assert torch.equal(result[1], x + 1)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("remembers_address", ["fp32[8]"]),
        ("remembers_object", ["fp32[8]"]),
        ("remembers_shape", ["fp32[8]", "bf16[8]"]),
        ("Remembering", ["fp32[3,6]"]),
        ("Remembering", ["bf16[3,6]"]),
        ("remembers_loss", ["fp32[64,64]", "fp32[64,64]"]),
    ],
)
def test_functions_that_return_results_of_earlier_inputs_are_refused(name, texts):
    with pytest.raises(
        ValueError, match=r"must compute its result from the values of its inputs, got the result of earlier"
    ):
        verified(name, *texts)


def test_a_study_refuses_them_before_it_measures():
    target = User(f"{FILE}:remembers_address", ["fp32[8]"])
    task = Task(target.name, target.case().name, "fp32", "fwd", "cpu", 0, target.detail(target.case()))
    with pytest.raises(ValueError, match="got the result of earlier inputs"):
        target.verify([task], 300.0, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("constant_result", "fp32[8]"),
        ("nothing_of_it", "fp32[8]"),
        (f"{WRITERS}:Counting", "fp32[8,4]"),
        ("demanding", "fp32[4] full(1)"),
    ],
)
def test_results_that_stay_the_same_by_themselves_are_no_earlier_ones(name, text):
    verified(name, text)


def verified(name, *texts):
    """The problem, made as for the check before a study."""
    target = User(name if ":" in name else f"{FILE}:{name}", texts)
    detail = {**target.detail(target.case()), VERIFY: True}
    return UserProblem(Task(target.name, target.case().name, target.case().dtypes[0], "fwd", "cpu", 0, detail))
