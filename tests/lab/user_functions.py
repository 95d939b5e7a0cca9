"""Functions that tests study as a user's own; imported by worker processes by this file's path."""

import dataclasses
import functools
import os
import signal
import warnings

import torch
import torch.utils.flop_counter
from torch import nn

import fusewise


def rms(x, weight, eps: float = 1e-6):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def several(x, y, index):
    return {"sum": x + y[index], "product": [x * y[index]], "largest": x.argmax(-1)}


def with_words(x):
    return {"of": "x", "result": (x * 2, 5), "also": x + 1}


def quantised(x):
    scale = max(abs(v) for v in (x.max().item(), x.min().item()))
    return torch.round(x / scale * 127) * (scale / 127)


def through_numpy(x):
    return torch.from_numpy(x.detach().numpy() * 2)


def doubled(x):
    return x * 2


def doubled_in_float64(x):
    return x.double() * 2


def noisy(x):
    return nn.functional.dropout(x, 0.5)


def nothing(x):
    return None


def number(x):
    return x.sum().item()


def by_keyword(x, *, width, height, depth=1):
    return x * width * height * depth


def faintly_noisy(x):
    return 1e-3 * torch.randn_like(x)


def hardly_noisy(x):
    return x + 1e-3 * torch.randn_like(x)


def of_random_size(x):
    return x[: int(torch.randint(1, len(x), ()))]


def largest(x):
    return x.topk(2).values


def above(x):
    return x[x > 0.5] * 2


def entropy(p):
    return nn.functional.binary_cross_entropy(p, p.detach().round())


def attention(q, k, v):
    return nn.functional.scaled_dot_product_attention(q, k, v)


def causal(q, k, v):
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def of_scores(q, k, v):
    """Attention as a function of scores, causal: a higher-order operator that can only run compiled."""
    from torch.nn.attention import flex_attention as flex

    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device=str(q.device))
    return flex.flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score * 0.5, block_mask=mask)


def either(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def either_product(x):
    return torch.cond(x.sum() > 99, lambda x: x.sin(), lambda x: x @ x, (x,))


def remembering_less(x, weight):
    return torch.utils.checkpoint.checkpoint(lambda x: (x @ weight).sin(), x, use_reentrant=False)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("no gradient on Tuesdays")


class SquareByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return torch.from_numpy(2 * ctx.saved_tensors[0].numpy() * g.numpy())


def squared_with_backward_by_numpy(x):
    return SquareByNumpy.apply(x)


def sparse_product(x, y):
    return x.to_sparse_csr() @ y


def without_gradient(x):
    return NoGradient.apply(x).sin()


def magnitude_of_bits(x):
    return (x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32)


def masked(x):
    return x.masked_fill(x > 0, torch.finfo(x.dtype).min)


def crashes(x):
    os.kill(os.getpid(), signal.SIGSEGV)


def forks(x):
    if process := os.fork():
        os.waitpid(process, 0)
    else:
        os._exit(0)
    return x * 2


def comes_back_twice(x):
    os.fork()
    return x * 2


def raises(x):
    try:
        return {}["tango"]
    except KeyError as error:
        raise RuntimeError("it failed:") from error


def arg_largest(x):
    return x.argmax(-1)


def with_large_integers(x):
    return x * 1e-9, torch.arange(10**6, 10**6 + 4)


def whole(x):
    return x.round().to(torch.int64)


def overwrites(x):
    return x.mul_(2)


def squeezes(x):
    return x.squeeze_(0) * 2


def resizes(x):
    return x.resize_(4, 16) * 2


def sparse(x):
    return x.to_sparse()


def without_values(x):
    return torch.empty(3, device="meta")


class Called:
    def __call__(self, x):
        return x * 2

    def halved(self, x):
        return x / 2


def twice(x):
    y = x * 2
    return y, y, x


def views_of_one(x):
    y = x * 2
    return y, y.t(), y[0]


def halves(x):
    return (x * 2).chunk(2, -1)


def summed(x):
    return x.sum(0)


def scattered(x, index, y):
    return x.scatter_add(1, index, y)


def of_everything(*xs):
    return sum(xs)


def scaled(x, scale=2.0, flag=True, mode="none", *, eps=0.0):
    return x * scale if flag else x - 1


def shifted(x, bias, by=None):
    return x + bias if by is None else x + bias + by


def adding_one(function):
    @functools.wraps(function)
    def added(*args):
        return function(*args) + 1

    return added


@adding_one
def plus_one(x):
    return x * 2


@adding_one
def by_sign(x):
    return x * 2 if x.sum() > 0 else x - 1


@adding_one
def kept_of_rows(x, count):
    return x[: int(count.max())]


@adding_one
def above_or_masked(x, mask):
    return torch.where(mask | (x > 0), x, 0.0)


class PlusOne(nn.Module):
    @adding_one
    def forward(self, x):
        return x * 2


called = Called()
halved = called.halved
tripled = functools.partial(torch.mul, torch.tensor(3.0))


def logarithm(x):
    return torch.log(x)


def quantized(x):
    return x.to(torch.float8_e4m3fn), x * 2


def rounded_straight_through(x):
    return x + (x.round() - x).detach()


def partly_detached(x):
    return x * x, x.detach() + 1


def spectrum(x):
    return torch.fft.fft(x)


def convolved(x, k):
    n = x.shape[-1] + k.shape[-1] - 1
    return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(k, n), n)


def conjugated(z, x):
    return z * z.conj() * (1 + 2j) * x


def turned(x):
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(z * torch.polar(torch.ones_like(z.real), z.real)).flatten(-2).to(x.dtype)


def modulus(z):
    return z.abs()


def asserts(x):
    assert x.dtype == torch.float32, "only float32"
    return x * 2


def gated(x, weight):
    return fusewise.geglu_linear(x, weight)


WEIGHT = torch.linspace(-1, 1, 64).reshape(8, 8)


def projected(x):
    return x @ WEIGHT


class Sized(nn.Module):
    def __init__(self, width):
        super().__init__()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        return nn.functional.gelu(self.linear(x))


class Tied(nn.Module):
    """Two layers share one weight; another is frozen."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 4).requires_grad_(False)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x)))


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))

    def forward(self, x):
        return self.linear(x)


class Lazy(nn.Module):
    """Its parameters are created in the first call."""

    def __init__(self):
        super().__init__()
        self.first = nn.LazyLinear(8)

    def forward(self, x):
        if not hasattr(self, "second"):
            self.second = nn.Linear(8, 8, dtype=x.dtype)
        return self.second(self.first(x))


class Holding(nn.Module):
    """Nothing to train: frozen weights, used and unused buffers, and a table."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4).requires_grad_(False)
        self.table = nn.Embedding(100, 4).requires_grad_(False)
        self.register_buffer("mask", torch.ones(8, 4))
        self.register_buffer("unused", torch.ones(1000))

    def forward(self, x):
        kept = self.mask[: len(x)] + torch.zeros_like(self.unused[:4])
        return self.linear(x) * kept * self.table(torch.tensor(3))


class Narrow(nn.Module):
    """A weight narrower than input and output, so its gradient is rounded."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x):
        return x * self.weight.float()


class Recurrent(nn.Module):
    """On a CPU a layer of it is one operator."""

    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(8, 16, 2)

    def forward(self, x):
        return self.layers(x)[0]


class Complex(nn.Module):
    """With a complex parameter and a complex buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x):
        return x.to(torch.complex64) @ self.weight * self.turn


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.linear(x))


def demanding(x):
    assert (x >= 0.9).all()
    return x * x


def greek(x, β=1.0):
    return x * β


def looked_up(table, index):
    return nn.functional.embedding(index, table)


def first_rows(x):
    return x[:10] * 2


def through_views(x, index):
    """Two of 2000 rows of four."""
    rows = x.view(-1, 4)[index, :] * x.view(-1, 4)[index + 1, :]
    return torch.cat((rows, rows), -1)


def looked_up_and_summed(table, index):
    return table[index], table.sum(0)


def left_out(x, y):
    return x * 2


def only_views(x):
    return x[:10], x.t()


class Telling(nn.Module):
    """Returns what it holds, too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        self.count[:2] += 1
        return x * self.weight, self.weight, self.count


class Keeping(nn.Module):
    """Writes a row of a cache and reads all of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.ones(100, 8))

    def forward(self, x):
        self.cache.index_copy_(0, torch.tensor([7]), x)
        return self.cache.sum(0)


@torch.library.custom_op("fusewise_tests::tripled", mutates_args=())
def _tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@torch.library.custom_op("fusewise_tests::counted", mutates_args=())
def _counted(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@torch.utils.flop_counter.register_flop_formula(torch.ops.fusewise_tests.counted)
def _operations(shape, *_, **__):
    return 3 * shape.numel()


def of_another_library(x):
    return _tripled(x)


def of_another_library_with_a_formula(x):
    return _counted(x)


def silu_and_rest(x, rest):
    return nn.functional.silu(x) + rest


def kept_outside(x, mask):
    return x.masked_fill(~mask, 0.0)


def of_whole_numbers(x, weight):
    return x @ weight.to(x.dtype)


def without_a_number(x):
    return x * torch.nan


def partly_linear(x, y):
    return x * 2 + y.sin()


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor | None = None


def dataclasses_of(x):
    return {"one": Pair(x * 2), "both": Pair(x + 1, x.sum())}


def sparse_gradient(table, index):
    return nn.functional.embedding(index, table, sparse=True)


_results = {}


def remembers_address(x):
    if x.data_ptr() not in _results:
        _results[x.data_ptr()] = x * 2
    return _results[x.data_ptr()]


@functools.lru_cache
def remembers_object(x):
    return x.sin()


def remembers_shape(x, y):
    """One of two results is kept."""
    return x * y, _results.setdefault(x.shape, x.exp().cumsum(0)).clone()


def remembers_loss(x, y):
    return _results.setdefault(("loss", x.shape), loss(x, y))


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.result = nn.Linear(6, 4), None

    def forward(self, x):
        if self.result is None:
            self.result = self.linear(x).detach()
        return self.result


def loss(x, y):
    return nn.functional.mse_loss(x, y)


def every_second(x):
    return x[..., ::2] * 2


def first_column(x):
    return x[:, 0] * 2


def with_a_bias_that_cancels(x, bias):
    return (x + bias).softmax(-1)


def nothing_of_it(x):
    return torch.zeros_like(x)


_table = torch.linspace(0, 1, 8)
_buffer = torch.empty(8)


def constant_result(x):
    """One output does not depend on the input, one is overwritten by the next call, one saturates."""
    torch.mul(x.detach(), 2, out=_buffer)
    return _table, _buffer, torch.sign(x.abs() + 1), x * _results.setdefault(("table", x.dtype), x.new_ones(8))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scripted = torch.jit.script(nn.Linear(4, 4))
    weight_normed = nn.utils.weight_norm(nn.Linear(4, 4))
not_a_function = 7
