import enum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusewise.lab.targets import inputs
from fusewise.lab.targets.inputs import TensorSpec, bound, parse, spec_of, written


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("text", "name", "spec"),
    [
        ("x=bf16[4096,4096]", "x", TensorSpec("bf16", (4096, 4096))),
        ("f32[2, 3]", "", TensorSpec("fp32", (2, 3))),
        ("x = float16 [8] uniform(-1,1)", "x", TensorSpec("fp16", (8,), fill="uniform", values=(-1, 1))),
        ("fp32[]", "", TensorSpec("fp32", ())),
        ("x=fp32[4,8]strides(1,4) fixed", "x", TensorSpec("fp32", (4, 8), (1, 4), fixed=True)),
        ("i=i64[5] randint(0,7)", "i", TensorSpec("i64", (5,), fill="randint", values=(0, 7))),
        ("x=torch.float32[5]", "x", TensorSpec("fp32", (5,))),
        ("z=complex64[5]", "z", TensorSpec("c64", (5,))),
        ("torch.double[5]", "", TensorSpec("fp64", (5,))),
        ("i=short[5]", "i", TensorSpec("i16", (5,))),
        ("mask=bool[5]", "mask", TensorSpec("bool", (5,))),
        ("x=fp32[3] full(0.5)", "x", TensorSpec("fp32", (3,), fill="full", values=(0.5,))),
        ("eps=1e-6", "eps", 1e-6),
        ("n=4", "n", 4),
        ("-3", "", -3),
        ("flag=True", "flag", True),
        ("bias=none", "bias", None),
        ('mode="tanh"', "mode", "tanh"),
    ],
)
def test_what_is_written_is_what_is_meant(text, name, spec):
    found = parse(text)
    assert found == (name, spec)
    assert type(found[1]) is type(spec)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x=fp99[4]", "must have a dtype of fp64, fp32, .*, got 'fp99'; choose one"),
        ("x=pf32[4]", "got 'pf32'; try 'f32' or 'fp32'"),
        ("x=fp32[a]", "must have integers as sizes, got 'a'"),
        ("x=fp32[32,,64]", "must have integers as sizes, got '32,,64'"),
        ("x=fp32[4] uniform(0,,1)", "must have numbers in uniform"),
        ("x=fp32[-1]", "must have sizes of at least 0"),
        ("x=fp32[4,4] strides(1)", "must have 2 strides, got 1"),
        ("x=fp32[4] uniform(1)", "must have 2 numbers in uniform, got 1"),
        ("x=fp32[4] uniform(2,1)", "must have LOW < HIGH"),
        ("x=fp32[4] uniform(0,inf)", "HIGH - LOW in uniform that is a finite fp32"),
        ("x=fp16[4] uniform(-40000,40000)", "HIGH - LOW in uniform that is a finite fp16"),
        ("x=i32[4] uniform(0,1)", "must be floating for uniform, got i32"),
        ("x=fp32[4] sometimes", "must have words of strides, fixed, .*, got 'sometimes'"),
        ("x=fp32[4] randn(a,b)", "must have numbers in randn"),
        ("x=fp32[4] 17", "must be a tensor with words behind it"),
        ("i=u8[4] randint(-5,5)", "must have numbers in randint that are some of u8, got -5,5"),
        ("i=i8[4] randint(0,129)", "must have numbers in randint that are some of i8"),
        ("x=fp32[4] randint(0,1e30)", "must have numbers in randint that are some of fp32"),
        ("i=i64[4] full(0.5)", "must have numbers in full that are some of i64, got 0.5"),
        ("i=i64[4] full(inf)", "must have numbers in full that are some of i64, got inf"),
        ("x=fp16[4] full(1e5)", "must have numbers in full that are some of fp16"),
        ("x=fp32[99999999999,99999999999]", r"must have less than 2\^63 bytes"),
        ("x=fp32[4] uniform(0,1) randn", "must tell a thing once, got 'randn'; leave one out"),
        ("x=fp32[4] fixed fixed", "must tell a thing once, got 'fixed'"),
        ("x=fp32[4] strides(1) strides(2)", "must tell a thing once, got 'strides'"),
        ("x=fp32[4] randn(0,-1)", "must have a finite MEAN and DEVIATION >= 0 in randn, got 0,-1"),
        ("x=fp16[4] randn(0,1e38)", "must have numbers in randn that are some of fp16"),
        ("x=fp32[4] full(1e400)", "must have numbers in full that a float64 has, got 1e400"),
        ("x=fp32[4] strides(9223372036854775807)", r"must have less than 2\^63 bytes"),
        (
            "x=tanh",
            "must be a tensor, a number, true, false, none or a quoted text, got 'tanh'; for a text try 'x=\"tanh\"'",
        ),
        ('x="', "must be a tensor, a number"),
        ("x=\"tanh'", "must be a tensor, a number"),
        ("tanh", "got 'tanh'; for a text try '\"tanh\"'"),
        ("x=fp32", r"got 'fp32'; try \"x=fp32\[1024,1024\]\""),
    ],
)
def test_what_cannot_be_read_is_told_with_a_fix(text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)


SIZES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(
    st.sampled_from(list(inputs.DTYPES)),
    SIZES,
    st.booleans(),
    st.sampled_from([("", ()), ("full", (1.0,)), ("randint", (0.0, 2.0))]),
    st.booleans(),
    st.sampled_from(["", "x", "long_name"]),
)
def test_written_and_read_back(dtype, sizes, strided, filled, fixed, name):
    spec = TensorSpec(dtype, sizes, sizes[::-1] if strided else (), *filled, fixed=fixed)
    assert parse(written(name, spec)) == (name, spec)


@given(
    st.one_of(
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.booleans(),
        st.none(),
        st.sampled_from(["", "a b"]),
    )
)
def test_scalars_are_read_back(value):
    assert parse(written("n", value)) == ("n", value)


def test_a_distribution_without_numbers_is_the_default_one():
    assert parse("x=fp32[4] randn")[1] == TensorSpec("fp32", (4,), fill="randn")


def test_a_tensor_is_the_same_wherever_it_is_made():
    spec = parse("x=fp32[4,8] strides(1,4)")[1]
    x, again, other = (spec.make(torch.device("cpu"), seed) for seed in ("a", "a", "b"))
    assert torch.equal(x, again)
    assert not torch.equal(x, other)
    assert x.stride() == (1, 4)


def test_ranges_hold():
    make = lambda text: parse(text)[1].make(torch.device("cpu"), "0")  # noqa: E731
    x = make("fp32[1000] uniform(2,3)")
    assert x.min() >= 2 and x.max() < 3 and x.std() > 0.2
    i = make("i64[1000] randint(-2,3)")
    assert i.unique().tolist() == [-2, -1, 0, 1, 2]
    x = make("fp32[10000] randn(5,0.1)")
    assert abs(x.mean() - 5) < 0.01 and abs(x.std() - 0.1) < 0.01
    assert make("fp32[3] full(0.5)").tolist() == [0.5] * 3
    z = make("c128[20,1000] strides(1,20) uniform(2,3)")
    assert (z.dtype, z.stride()) == (torch.complex128, (1, 20))
    assert z.real.min() >= 2 and z.imag.max() < 3 and not torch.equal(z.real, z.imag)
    assert make("c64[0,2]").shape == (0, 2)
    assert make("bool[100]").unique().tolist() == [False, True]


def test_arguments_become_specs_of_their_kind_and_range():
    assert spec_of(3) == 3
    assert spec_of(torch.zeros(2, 3).t()) == TensorSpec("fp32", (3, 2), (1, 3), fill="full", values=(0.0,))
    assert spec_of(torch.tensor([2, 9])) == TensorSpec("i64", (2,), fill="randint", values=(2, 10))
    assert [spec_of(torch.tensor(x)).values for x in ([True, True], [False, False], [True, False])] == [(1,), (0,), ()]
    assert spec_of(torch.rand(100)).fill == "uniform"
    assert parse(written("", spec_of(torch.tensor([0, 1234567]))))[1].values == (0, 1234568)  # to the last digit
    largest = spec_of(torch.full((3,), torch.iinfo(torch.int64).max))  # as near as a double comes
    assert parse(written("", largest))[1].make(torch.device("cpu"), "").tolist() == [2**63 - 2**10] * 3
    z = spec_of(torch.complex(torch.full((100,), 3.0), torch.full((100,), 7.0)).requires_grad_(), True)
    assert z == TensorSpec("c64", (100,), fill="uniform", values=(3.0, 7.0))  # of both parts
    assert spec_of(torch.randn(9, dtype=torch.complex64).conj(), True).fixed
    mask = spec_of(torch.tensor([-torch.inf, -2.0, -torch.inf, 4.0]))
    assert (mask.fill, mask.values) == ("randn", (1.0, 3.0))  # over the finite values
    assert spec_of(torch.tensor([torch.inf])).values == (torch.inf,)
    spec = spec_of(torch.randn(1000) * 7, fixed_unless_wanted=True)
    assert (spec.fill, spec.fixed) == ("randn", True)
    assert 6 < spec.values[1] < 8
    for count in (64, 10**5):  # the next draw has the same name
        assert spec_of(torch.randn(count, generator=torch.Generator().manual_seed(1))) == TensorSpec("fp32", (count,))
        drawn = torch.rand(count, generator=torch.Generator().manual_seed(1))
        assert spec_of(drawn) == TensorSpec("fp32", (count,), fill="uniform", values=(0.0, 1.0))
    assert spec_of(torch.linspace(0.2, 0.9, 100)).values == pytest.approx((0.2, 0.9))
    with pytest.raises(TypeError, match=r"arguments must be tensors, numbers, .*, got list"):
        spec_of([1])
    with pytest.raises(TypeError, match=r"tensors must be of .*, got torch.uint16"):
        spec_of(torch.zeros(2, dtype=torch.uint16))
    for odd in (torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(TypeError, match="tensors must have values and strides"):
            spec_of(odd)


@pytest.mark.parametrize("value", [np.float64(1e-6), Color.RED, np.str_("a")])
def test_numbers_of_an_enum_or_of_numpy_become_plain(value):
    assert parse(written("x", spec_of(value)))[1] == value


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([0.0, torch.finfo(torch.bfloat16).max], dtype=torch.bfloat16),
        torch.tensor([0.0, torch.finfo(torch.float64).max], dtype=torch.float64),
        torch.tensor([complex(torch.finfo(torch.float32).max, 0)]),
        torch.tensor([torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max]),
    ],
)
def test_values_at_the_ends_of_a_dtype_stay_within_it(value):
    _, spec = parse(written("x", spec_of(value)))
    assert spec.make(torch.device("cpu"), "x").isfinite().all()


def test_inputs_are_bound_to_parameters():
    assert [n for n, _ in bound(["x", "y", "eps"], ["y=fp32[2]", "fp32[3]"])] == ["x", "y"]
    for texts in (["z=fp32[2]"], ["x=fp32[2]", "x=fp32[2]"], ["1", "2", "3", "4"]):
        with pytest.raises(ValueError, match=r"inputs must be among the parameters \(x, y, eps\), each once"):
            bound(["x", "y", "eps"], texts)
