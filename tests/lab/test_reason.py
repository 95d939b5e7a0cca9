"""The one-line summary of an exception names its cause."""

import pytest
import torch
from builders import row, study_record

from fusewise.lab import Provider, worker
from fusewise.lab.code import worker as code_worker
from fusewise.lab.reason import LONGEST, message, reason
from fusewise.lab.render import html


def raised(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


def chained(text, cause):
    try:
        raise RuntimeError(text) from cause
    except RuntimeError as error:
        return error


def squared(x):
    return torch.mm(x, x)


def bare():
    raise AssertionError


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError


def speechless(*_):
    raise Speechless


def test_an_exception_that_cannot_say_what_it_is_costs_its_own_row():
    assert reason(raised(speechless)) == "Speechless: no message, raised by `raise Speechless`"
    server = worker.Server(Provider(), "cpu", 0)
    server.load = speechless
    reply = server.attempt(
        {
            "do": "load",
            "task": {"op": "gelu", "case": "gelu-5x5", "dtype": "fp32", "pass_": "fwd", "device": "cpu", "seed": 0},
        }
    )
    assert (reply["status"], reply["reason"]) == ("failed", "Speechless: no message, raised by `raise Speechless`")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_tells_what_failed_in_its_interpreter():
    scripted = torch.jit.script(squared)
    told = reason(raised(lambda: scripted(torch.ones(2, 3))))
    assert told.startswith(
        "RuntimeError: The following operation failed in the TorchScript interpreter. … RuntimeError:"
    )
    assert told.endswith("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)")


def test_torch_compile_tells_what_its_backend_raised():
    def backend(graph, inputs):
        raise RuntimeError("no such instruction")

    torch.compiler.reset()
    error = raised(lambda: torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2)))
    assert reason(error) == "BackendCompilerFailed: backend='backend' raised: … RuntimeError: no such instruction"


def test_dynamo_explains_itself():
    def branches(x):
        return x * 2 if x.sum() > 0 else x

    torch.compiler.reset()
    told = reason(raised(lambda: torch.compile(branches, fullgraph=True, backend="eager")(torch.ones(2))))
    assert told.startswith("Unsupported: ")
    assert "Explanation: Detected data-dependent branching" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("one line", "one line"),
        ("\n  \nafter empty ones\n", "after empty ones"),
        ("the first says it\nand the second is of no use", "the first says it"),
        ("at 2:8:\ndef k(x):\n    y = arange(0, 3)\n        ^\nrange must be a power of 2", "at 2:8: … range must be a power of 2"),
        ("Error(s) in loading:\n\tMissing key(s): a. \n", "Error(s) in loading: … Missing key(s): a."),
        ("it failed:\nno such kernel\nTraceback of it:\n  File \"a.py\"\nSet TORCH_LOGS=1\nFor more, see\n ~~~ <--- HERE", "it failed: … no such kernel"),
        ("KeyError: 'x'", "KeyError: 'x'"),
        ("only a colon:", "only a colon:"),
        ("cannot call <f at 0x7f0A12> of <X object at 0x55>", "cannot call <f> of <X object>"),
        ("no access at 0x7f0a12", "no access at 0x7f0a12"),
        ("", "no message"),
    ],
)  # fmt: skip
def test_the_line_that_says_why(text, told):
    assert message(RuntimeError(text)) == told


def test_what_it_was_raised_from_is_told_once():
    assert message(chained("cannot export", KeyError("no rule"))) == "cannot export … KeyError: 'no rule'"
    assert message(chained("cannot export: no rule", ValueError("no rule"))) == "cannot export: no rule"
    assert message(chained("first", OSError("second:\nthird"))) == "first … OSError: second: … third"
    deep = chained("first", chained("second", chained("third", OSError("the disk"))))
    assert message(deep) == "first … OSError: the disk"
    own = RuntimeError("its own cause")
    own.__cause__ = own
    assert message(own) == "its own cause"


def test_an_exception_without_a_message_tells_the_line():
    assert reason(raised(lambda: bare())) == "AssertionError: no message, raised by `raise AssertionError`"
    assert reason(raised(lambda: exec("raise KeyError"))) == "KeyError: no message"


def test_it_is_bounded_and_on_one_line():
    told = message(chained("a" * 5000, ValueError("b" * 5000)))
    assert len(told) <= LONGEST + len(" … ")
    assert "aaa… … ValueError: bbb" in told
    assert "\n" not in message(RuntimeError("x:\n" * 100))
    assert message(RuntimeError("a" * LONGEST)) == "a" * LONGEST


class Scripted(Provider):
    name = "scripted"

    def build(self, problem):
        raise chained("it failed in the interpreter:\n  here\n<b>no & rule</b>", KeyError("tango"))

    def stages(self, problem, target):
        self.build(problem)


@pytest.mark.parametrize(
    ("server", "do"), [(worker.Server(Scripted(), "cpu", 0), "prepare"), (code_worker.Server(Scripted()), "stages")]
)
def test_rows_have_it(server, do):
    task = {"op": "gelu", "case": "gelu-5x5", "dtype": "fp32", "pass_": "fwd", "device": "cpu", "seed": 0}
    reply = server.answer({"do": do, "task": task, "target": "cpu"})
    told = "RuntimeError: it failed in the interpreter: … <b>no & rule</b> … KeyError: 'tango'"
    assert (reply["status"], reply["reason"]) == ("failed", told)
    assert "<b>no" not in html.report(study_record([row("scripted", status="failed", reason=told)]))
