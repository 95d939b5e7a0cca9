"""An operator that torch.compile keeps whole.

torch.compile traces Python into a graph of operators. A kernel launched from Python, ctypes or C++ is not an operator and
causes a graph break. Three steps make it one:

    1. a schema and an implementation    the compiler sees one opaque node
    2. a fake implementation             shapes, strides and dtypes without data, all that a compiler needs
    3. autograd outside the operator     backward calls the same operator, so it is also one node
"""

import ctypes

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

memcpy = ctypes.CDLL(None).memcpy  # stands in for any launch that the compiler cannot trace
memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def launch(x, cos, sin, inverse):
    """Rotate a contiguous x (T, H, D) and write the result through a raw pointer."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], (-sin if inverse else sin)[:, None]
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    y = torch.empty_like(rotated)
    memcpy(y.data_ptr(), rotated.data_ptr(), rotated.nbytes)
    return y


# 1. The operator. Its schema is inferred from the annotations: rope(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor
@torch.library.custom_op("learn::rope", mutates_args=())
def rope_op(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    return launch(x, cos, sin, inverse)


# 2. The fake implementation: the output for tensors without data.
@rope_op.register_fake
def _(x, cos, sin, inverse):
    return torch.empty_like(x)


# 3. Autograd around it. A call without gradients calls the operator directly.
class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, inverse):
        ctx.save_for_backward(cos, sin)
        ctx.inverse = inverse
        return rope_op(x, cos, sin, inverse)

    @staticmethod
    def backward(ctx, dy):
        return rope_op(dy.contiguous(), *ctx.saved_tensors, not ctx.inverse), None, None, None


def rope(x, cos, sin):
    if torch.is_grad_enabled() and x.requires_grad:
        return Rope.apply(x, cos, sin, False)
    return rope_op(x, cos, sin, False)


torch.manual_seed(0)
T, H, D = 8, 4, 32
angles = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, D, 2) / D))
cos, sin = angles.cos(), angles.sin()
x = torch.randn(T, H, D, requires_grad=True)

# A bare launch inside Python cannot be traced.
try:
    torch.compile(launch, backend="eager", fullgraph=True)(x.detach(), cos, sin, False)
    raise AssertionError("the launch was traced")
except torch._dynamo.exc.Unsupported as error:
    print(f"the bare launch: {str(error).splitlines()[0]}")

# PyTorch's own consistency check of schema, fake and implementation.
checked = torch.library.opcheck(rope_op, (x.detach(), cos, sin, True))
print("opcheck:", ", ".join(checked))
assert set(checked.values()) == {"SUCCESS"}

# The forward and backward graphs of a compiled function that calls it.
graphs = []


def keep(graph, inputs):
    graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
    return make_boxed_func(graph.forward)


compiled = torch.compile(
    lambda x: (rope(x * 2, cos, sin) + 1).sum(), backend=aot_autograd(fw_compiler=keep), fullgraph=True
)
loss = compiled(x)
(dx,) = torch.autograd.grad(loss, x)
for name, targets in zip(("forward", "backward"), graphs, strict=True):
    print(f"{name}: {', '.join(str(target) for target in targets)}")
    assert targets.count(torch.ops.learn.rope.default) == 1  # exactly one node in each direction

(expected,) = torch.autograd.grad((rope(x * 2, cos, sin) + 1).sum(), x)
assert torch.allclose(dx, expected)
