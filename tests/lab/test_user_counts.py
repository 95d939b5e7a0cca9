"""The minimum bytes and operations of a user's function."""

import pytest
from user_problems import FILE, RMS, WRITERS, problem

from fusewise.lab.plugin import Unsupported
from fusewise.lab.providers.floors import Copy
from fusewise.lab.providers.pytorch import Eager
from fusewise.lab.targets.user import User
from fusewise.lab.worker import Server


def test_bytes_and_flops():
    p = problem("doubled", "x=fp32[8,16]", pass_="bwd")
    assert p.bytes_min() == 2 * 8 * 16 * 4  # a linear function: dy read, dx written
    assert p.flops_min() == 0
    assert problem("twice", "x=fp32[8,16]", pass_="bwd").bytes_min() == 4 * 512  # three gradients read, one written
    p = problem("summed", "x=fp32[8,16]", pass_="bwd")
    assert p.bytes_min() == 0  # the sum's gradient, expanded: nothing is read
    with pytest.raises(Unsupported, match="no byte has to move"):
        Copy().build(p)
    assert problem("torch:round", "fp32[8,16]", pass_="bwd").bytes_min() == 512  # zeros written
    by_numpy = problem("squared_with_backward_by_numpy", "fp32[8,16]", pass_="bwd")
    assert by_numpy.bytes_min() == 3 * 512  # the gradient and x are read, though by no operator
    p = problem("scattered", "x=fp32[8,16]", "index=i64[8,2] randint(0,16)", "y=fp32[8,2]", pass_="bwd")
    read = p.costs.gradient_other - 8 * 2 * 4  # x's gradient is that of the sum, y's is some of it
    assert 8 * 4 <= read <= 8 * 2 * 4
    p = problem("rms", *RMS, dtype="bf16", pass_="bwd")
    assert p.bytes_min() == 2 * (8 * 16 + 2 * (8 * 16 + 16))  # dy and both inputs read, both gradients written
    p = problem("Net", "fp32[3,6]", pass_="fwd+bwd")
    assert p.flops_min() == 3 * 2 * 3 * 6 * 4
    assert p.shape() == "x=fp32[3,6] parameters[28]"


def test_bytes_count_what_is_not_learned_as_far_as_it_is_read():
    held = 4 * (4 * 6 + 4 + 3 * 4 + 4)  # weight, bias, three rows of the mask, one of the table
    p = problem("Holding", "x=fp32[3,6]")
    assert p.bytes_min() - held - 4 * (3 * 6 + 3 * 4) in (0, 8)  # x, y, and perhaps the index, created from a number
    back = problem("Holding", "x=fp32[3,6]", pass_="bwd")
    assert back.bytes_min() == 4 * (3 * 4 + 3 * 6) + 4 * 4 * 6  # dy, dx, weight
    assert problem("projected", "x=fp32[8,8]").bytes_min() == 3 * 4 * 8 * 8  # the file has a tensor of its own


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("largest", "x=fp32[8,16]", True),  # which elements have a gradient is known from x
        ("above", "x=fp32[8,16]", True),  # and here how many gradients there are
        ("entropy", "p=fp32[8,16] uniform(0.1,0.9)", True),  # accepts only probabilities
        ("demanding", "x=fp32[16] full(1)", True),  # rejects other values
        ("doubled", "x=fp32[8,16] strides(0,1)", False),
        ("doubled", "x=fp32[]", False),
    ],
)
def test_whether_a_gradient_reads_the_inputs(name, text, read):
    assert (problem(name, text, pass_="bwd").costs.gradient_read > 0) == read


@pytest.mark.parametrize(
    ("name", "texts", "flops", "products"),
    [
        ("Recurrent", ["fp32[3,2,8]"], 2 * 6 * 64 * (8 + 16 + 16 + 16), 2),
        ("torch:mv", ["fp32[3,7]", "fp32[7]"], 2 * 3 * 7, 1),  # the rest is no sum
        ("torch:addmv", ["fp32[3]", "fp32[3,7]", "fp32[7]"], 2 * 3 * 7, 1),
        ("torch:addbmm", ["fp32[3,4]", "fp32[2,3,7]", "fp32[2,7,4]"], 2 * 2 * 3 * 7 * 4, 2),
    ],
)
def test_products_that_pytorch_has_no_formula_for(name, texts, flops, products):
    """`products`: the backward has this many times the forward's operations."""
    assert problem(name, *texts).flops_min() == flops
    assert problem(name, *texts, pass_="bwd").flops_min() == products * flops


@pytest.mark.parametrize(
    ("name", "texts", "forward", "backward"),
    [
        ("torch.nn.functional:bilinear", ["fp32[5,3]", "fp32[5,4]", "fp32[6,3,4]"], 2 * 5 * 72, 2 * 2 * 5 * 72),
        ("torch:cdist", ["fp32[5,3]", "fp32[7,3]"], 2 * 35 * 3, 2 * 2 * 35 * 3),
        ("torch.linalg:solve", ["fp32[12,12]", "fp32[12,3]"], 2 * 12**3 // 3 + 2 * 12**2 * 3, 2 * 2 * 12**2 * 3),
    ],
)
def test_operations_of_what_is_made_of_other_sums(name, texts, forward, backward):
    """The backward has at most twice the forward's operations: recomputation is not a necessary cost."""
    assert problem(name, *texts).flops_min() == forward
    assert problem(name, *texts, pass_="bwd").flops_min() == backward


def test_products_of_a_backward_are_those_that_it_needs():
    assert problem("attention", *["fp32[1,2,8,4]"] * 3).flops_min() == 2 * (2 * 2 * 8 * 8 * 4)
    assert problem("attention", *["fp32[1,2,8,4]"] * 3, pass_="bwd").flops_min() == 4 * (2 * 2 * 8 * 8 * 4)
    scores = 3 * 4 // 2 + (5 - 3) * 3  # of five queries and three keys, as far as a query sees them
    for pass_, products in (("fwd", 2), ("bwd", 4)):
        causal = problem("causal", "fp32[1,2,5,4]", *["fp32[1,2,3,4]"] * 2, pass_=pass_)
        assert causal.flops_min() == products * (2 * 2 * scores * 4)
    product = 2 * 3 * 6 * 4
    assert problem("Net", "fp32[3,6] fixed", pass_="bwd").flops_min() == product  # only the weight's gradient
    assert problem("remembering_less", "fp32[3,6]", "fp32[6,4]", pass_="bwd").flops_min() == 2 * product


@pytest.mark.parametrize("name", ["twice", "partly_detached"])
def test_a_worker_that_goes_on_with_another_pass_has_its_bytes_and_gradients(name):
    first, alone = (problem(name, "x=fp32[8,16]", pass_=pass_) for pass_ in ("fwd", "bwd"))
    server = Server(Eager(), "cpu", 0)
    assert server.prepare(first.task)["bytes_min"] == first.bytes_min()
    kept = server.problem
    reply = server.prepare(alone.task)
    assert server.problem is kept
    assert (reply["status"], reply["bytes_min"]) == ("ok", alone.bytes_min())


def test_a_case_counts_its_inputs_before_the_function_ran():
    target = User(f"{FILE}:rms", RMS)
    assert target.case().bytes_min("fwd", "bf16") == 2 * (8 * 16 + 16)


def test_bytes_count_what_is_distinct():
    p = problem("twice", "x=fp32[8,16]")
    assert p.bytes_min() == 2 * 512  # x read, one product written; a view of x is free
    assert problem("doubled", "x=fp32[8,16] strides(0,1)").bytes_min() == 16 * 4 + 512
    assert problem("views_of_one", "x=fp32[8,16]").bytes_min() == 2 * 512  # one product, and views of it
    assert problem("halves", "x=fp32[8,16]").bytes_min() == 2 * 512


def test_products_of_our_own_operations_are_counted():
    p = problem("gated", "x=fp32[4,8]", "weight=fp32[12,8]")
    assert p.flops_min() == 2 * 4 * 8 * 12


def test_bytes_of_complex_numbers():
    assert problem("conjugated", "z=c64[8]", "x=fp32[8]").bytes_min() == 8 * 8 + 8 * 4 + 8 * 8
    assert problem("spectrum", "x=fp32[8]", pass_="bwd").bytes_min() == 8 * 8 + 8 * 4  # a linear function


def test_a_buffer_that_is_written_is_bytes_that_move():
    assert problem(f"{WRITERS}:Counting", "fp32[8,4]").bytes_min() == problem("doubled", "fp32[8,4]").bytes_min() + 4


@pytest.mark.parametrize(
    ("name", "texts", "forward", "backward"),
    [
        # 1000 rows of 8; two indices, both 3: one row is read, two are written; the dense gradient is written whole
        ("looked_up", ["table=fp32[1000,8]", "index=i64[2] full(3)"], 32 + 16 + 64, 64 + 32000 + 16),
        ("first_rows", ["x=fp32[1000,8]"], 320 + 320, 320 + 32000),
        ("through_views", ["x=fp32[1000,8]", "index=i64[2] full(3)"], 32 + 16 + 64, 64 + 32000 + 32 + 16),
        ("looked_up_and_summed", ["table=fp32[1000,8]", "index=i64[2] full(3)"], 32000 + 16 + 64 + 32, None),
        ("left_out", ["x=fp32[10]", "y=fp32[1000]"], 80, None),
        ("only_views", ["x=fp32[1000,8]"], 0, None),
        ("through_numpy", ["x=fp32[10]"], 80, None),  # no operator reads x, but the result depends on it
        ("torch.nn.functional:max_pool2d", ["fp32[1,9,9]", "2"], 4 * (64 + 16), None),
        ("Telling", ["fp32[3,4]"], 4 * (3 * 4 + 4 + 3 * 4) + 2 * 4, None),  # of what it holds two elements are written
        ("Keeping", ["fp32[1,8]"], 32 + 32 + 32 + 99 * 32 + 8, None),  # one row of its cache is written, 99 are read
    ],
)
def test_bytes_of_what_is_read_in_parts(name, texts, forward, backward):
    assert problem(name, *texts).bytes_min() == forward
    if backward is not None:
        assert problem(name, *texts, pass_="bwd").bytes_min() == backward


def test_operations_that_have_no_count_are_unknown():
    p = problem("torch.linalg:svdvals", "fp32[4,4]")
    assert (p.flops_min(), p.flops_unknown()) == (None, ["aten._linalg_svd"])
    assert problem("torch.linalg:svdvals", "fp32[4,4]", pass_="bwd").flops_min() is not None  # products of its factors
    assert problem("through_numpy", "x=fp32[4]").flops_unknown() == ["code that is no operator of PyTorch"]
    assert problem("of_another_library", "x=fp32[4]").flops_unknown() == ["fusewise_tests.tripled"]
    assert problem("of_another_library_with_a_formula", "x=fp32[4]").flops_min() == 12


@pytest.mark.parametrize(
    ("name", "texts", "read"),
    [
        ("torch:mm", ["fp32[8,4]", "fp32[4,6]"], 4 * (32 + 24)),
        ("torch:mm", ["fp32[8,4] fixed", "fp32[4,6]"], 4 * 32),  # the gradient of the second reads the first alone
        ("partly_linear", ["x=fp32[8,16]", "y=fp32[8,16]"], 4 * 128),
        ("without_a_number", ["x=fp32[8,16]"], 0),  # the gradient is NaN whatever x is
        ("Net", ["fp32[3,6]"], 4 * (3 * 6 + 4 * 6 + 4)),
        ("torch.nn.functional:linear", ["fp32[3,6]", "fp32[4,6]", "fp32[4]"], 4 * (3 * 6 + 4 * 6)),  # not the bias
        ("silu_and_rest", ["fp32[64,64]", "fp32[64,64]"], 4 * 64 * 64),  # not the second
        ("torch:mm", ["fp32[8,4] full(0)", "fp32[4,6]"], 4 * (32 + 24)),  # as a bias is at first
        ("kept_outside", ["fp32[8,4]", "bool[8,4]"], 32),
        ("torch:topk", ["fp32[8,16]", "3"], 8 * 3 * 8),  # its indices
        ("sparse_product", ["fp32[8,4]", "fp32[4,6]"], 4 * (32 + 24)),
        ("of_whole_numbers", ["fp32[8,4]", "i8[4,6] randint(-128,128)"], 24),  # its copy in fp32 has 96 bytes
    ],
)
def test_a_gradient_reads_only_what_it_depends_on(name, texts, read):
    assert problem(name, *texts, pass_="bwd").costs.gradient_read == read


def test_memory_that_a_backward_frees_is_not_taken_for_what_comes_after():
    p = problem("convolved", "x=fp32[2,32]", "k=fp32[5]", pass_="bwd")
    assert p.bytes_min() == 4 * (2 * 36 + 2 * (2 * 32 + 5))  # dy and both inputs read, both gradients written
