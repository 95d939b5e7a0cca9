"""User functions that are given from Python: where they are, or how those of a notebook are written to a file, and `study`."""

import __future__

import functools
import linecache
import math
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from builders import row, study_record

import fusewise
from fusewise.lab.api import Result, place, study, written
from fusewise.lab.nursery import WORKER
from fusewise.lab.targets.functions import load

pytestmark = pytest.mark.usefixtures("forked")

NOTEBOOK = """
import enum, math, torch
import torch.nn.functional as F
from pathlib import Path as P
scale, dtype = 2.0, None
def inner(x):
    return F.gelu(x) * scale
def outer(x, y):
    return inner(x) + math.pi * y
def uses_state(x):
    return x * state
def made(factor):
    def multiplied(x):
        return x * factor
    return multiplied
multiplied, kernel = made(3), torch.ops.aten.gelu
def uses_operator(x):
    return kernel(x)
def uses_another(x):
    return softly(x)
state = [1]
shape = [1, 2]
lowest, highest, unknown, turn = -math.inf, math.inf, math.nan, complex(1, -math.inf)
dims, place, one = (0, (1, "a")), torch.device("cpu"), (lowest,)
class Width(enum.IntEnum):
    narrow = 4
width = Width.narrow
def wrapped(f):
    return f
@wrapped
def shapes(y):
    return y.shape
@wrapped
@torch.no_grad()
def masked(x: torch.Tensor, low: float = lowest) -> tuple:
    def inside(y):
        return shapes(y), [lowest for _ in y.shape]
    return low, highest, unknown, turn, width, dims, one, place, *inside(x)
"""


@pytest.fixture
def notebook(monkeypatch):
    """A module __main__ without a file, as in a notebook."""
    main = types.ModuleType("__main__")
    linecache.cache["<cell>"] = (len(NOTEBOOK), None, NOTEBOOK.splitlines(keepends=True), "<cell>")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(NOTEBOOK, "<cell>", "exec"), main.__dict__)
    return main


def test_a_function_of_a_notebook_is_written_to_a_file(notebook, tmp_path):
    where = place(notebook.outer, tmp_path / "run")
    x = torch.ones(2)
    assert torch.equal(load(where)(x, x), notebook.outer(x, x))
    assert where == f"{tmp_path / 'run-source' / 'outer.py'}:outer"


def test_constants_defaults_and_decorators_come_along_and_attributes_are_no_names(notebook, tmp_path):
    found = load(place(notebook.masked, tmp_path / "run"))(torch.ones(2))
    assert repr(found) == repr(
        (
            -math.inf,
            math.inf,
            math.nan,
            complex(1, -math.inf),
            4,
            (0, (1, "a")),
            (-math.inf,),
            torch.device("cpu"),
            torch.Size([2]),
            [-math.inf],
        )
    )


def test_what_is_imported_is_what_the_notebook_has(notebook, monkeypatch):
    """Not the function whose name its decorator has kept."""
    other = types.ModuleType("other")
    other.plain = types.FunctionType(notebook.inner.__code__, {"__name__": "other"}, "plain")
    other.softly = notebook.softly = functools.wraps(other.plain)(lambda x: other.plain(x))
    monkeypatch.setitem(sys.modules, "other", other)
    assert "from other import softly as softly\n" in written(notebook.uses_another)


def test_annotations_that_are_not_evaluated_stay_so(monkeypatch, tmp_path):
    main, text = types.ModuleType("__main__"), "def f(x: Nowhere):\n    return x\n"
    monkeypatch.setitem(linecache.cache, "<lazy>", (len(text), None, text.splitlines(keepends=True), "<lazy>"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(text, "<lazy>", "exec", flags=__future__.annotations.compiler_flag), main.__dict__)
    assert load(place(main.f, tmp_path / "run"))(3) == 3


def test_what_a_notebook_cannot_give_away_is_said(notebook, tmp_path):
    with pytest.raises(ValueError, match="got state of type list; make it an argument, or save the function to a file"):
        written(notebook.uses_state)
    with pytest.raises(ValueError, match="got factor of the function that made multiplied; make it an argument"):
        written(notebook.multiplied)
    with pytest.raises(ValueError, match="got kernel of type OpOverloadPacket"):  # of a module that cannot be imported
        written(notebook.uses_operator)
    with pytest.raises(ValueError, match=r"must be defined at the top of a file or cell, got .*<lambda>"):
        place(lambda x: x, tmp_path)
    with pytest.raises(TypeError, match="got a module's instance; give its class"):
        place(torch.nn.ReLU(), tmp_path)
    with pytest.raises(ValueError, match="top of a file or cell, got one made of the outer there; define a function"):
        place(torch.vmap(notebook.outer), tmp_path)
    for other in (torch.nn.ReLU().forward, torch.vmap(torch.nn.functional.softmax), torch.Tensor.exp):
        with pytest.raises(ValueError, match="must be defined at the top of a file or cell"):
            place(other, tmp_path)  # its name refers to another function


MADE_FROM_OTHERS = """
import functools, torch
def twice(f):
    @functools.wraps(f)
    def doubled(x):
        return 2 * f(x)
    return doubled
@twice
@torch.no_grad()
def decorated(x):
    return x + 1
@torch.compile
def compiled(x):
    return x + 1
def compiled_later(x):
    return x + 1
compiled_later = torch.compile(compiled_later)
short = lambda x: x + 1
mapped = torch.vmap(lambda x: x + 1)
def wrapped_later(x):
    return x + 1
wrapped_later = twice(wrapped_later)
@torch.no_grad()
def wrapped_again(x):
    return x + 1
wrapped_again = twice(wrapped_again)
short_mapped = lambda x: x[0]
short_mapped = torch.vmap(short_mapped)
renamed = short_named = short
other = decorated
other_compiled = torch.compile(compiled)
def maker():
    return lambda x: x + 1
of_maker = maker()
class Holder:
    @staticmethod
    def held(x):
        return x + 1
"""


@pytest.fixture
def cell(monkeypatch):
    main, text = types.ModuleType("__main__"), MADE_FROM_OTHERS
    names = [
        "decorated",
        "compiled",
        "compiled_later",
        "short",
        "mapped",
        "wrapped_later",
        "wrapped_again",
        "short_mapped",
    ]
    names += ["renamed", "other", "other_compiled", "of_maker"]
    text += "".join(f"def uses_{name}(x):\n    return {name}(x)\n" for name in names)
    monkeypatch.setitem(linecache.cache, "<made>", (len(text), None, text.splitlines(keepends=True), "<made>"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(text, "<made>", "exec"), main.__dict__)
    return main


@pytest.mark.parametrize("name", ["decorated", "compiled", "compiled_later", "short", "mapped"])
def test_a_notebooks_function_is_written_with_all_that_its_definition_makes_of_it(cell, tmp_path, name):
    x = torch.ones(2, 2)
    found = load(place(getattr(cell, f"uses_{name}"), tmp_path / "run"))
    assert torch.equal(found(x), torch.full((2, 2), 4.0 if name == "decorated" else 2.0))


@pytest.mark.parametrize(
    "name", ["wrapped_later", "wrapped_again", "short_mapped", "renamed", "other", "other_compiled", "of_maker"]
)
def test_a_notebooks_function_that_its_definition_does_not_make_is_refused(cell, tmp_path, name):
    """Its source is that of the function inside, which would be measured instead."""
    with pytest.raises(ValueError, match=f"got {name}, made from another; decorate that where it is defined"):
        place(getattr(cell, f"uses_{name}"), tmp_path)
    if name.startswith("wrapped"):
        with pytest.raises(ValueError, match=f"got {name}, made from another"):
            place(getattr(cell, name), tmp_path)


def test_a_method_of_a_notebook_is_refused_as_no_top_level_name(cell, tmp_path):
    with pytest.raises(ValueError, match="must be defined at the top of a file or cell, got held, which is not"):
        place(cell.Holder.held, tmp_path)


def test_a_script_of_another_name_is_told(monkeypatch, tmp_path):
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "script")
    Path(main.__file__).write_text("def f(x):\n    return x\n")
    exec("def f(x):\n    return x", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(ValueError, match=r"^study: function must be in a file NAME.py, got 'script'; rename it"):
        place(main.f, tmp_path)


def test_importable_functions_are_named_by_their_module():
    assert place(math.gamma, Path("unused")) == "math:gamma"
    assert place(torch.add, Path("unused")) == "torch:add"


def test_what_is_no_function_is_told():
    with pytest.raises(TypeError, match=r"^study: function must be one that can be called, got 'rms'; "):
        study("rms", torch.ones(1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"round": 5}, r"options must be among providers, passes, .*, code, got 'round'; try 'rounds'"),
        ({"tango": 5}, r"got 'tango'; give a function's own arguments by position"),
        ({"eps": 1e-3}, r"got 'eps'; give the function its eps by position"),
        ({"out": ""}, r"out must be the path of a folder, got ''; give it a name"),
        ({"out": 5}, r"out must be the path of a folder, got 5; "),
        ({"rounds": "many"}, r"rounds must be a number or \(MIN, MAX\), got 'many'; try"),
        ({"rounds": 5.0}, r"rounds must be a number or \(MIN, MAX\), got 5.0"),
        ({"rounds": (3, 4, 5)}, r"rounds must be a number or \(MIN, MAX\), got \(3, 4, 5\)"),
        ({"rounds": 2}, r"rounds must be MIN:MAX with 3 <= MIN <= MAX, got 2:2"),
        ({"timeout": "5"}, r"timeout must be a finite number of seconds, at least 0, got '5'"),
        ({"timeout": None}, r"timeout must be a finite number of seconds, at least 0, got None"),
        ({"timeout": 10**309}, r"timeout must be a finite number of seconds, at least 0, got 1000"),
        ({"time_limit": ""}, r"time_limit must be a finite number of seconds, at least 0, got ''"),
        ({"time_limit": -1}, r"time_limit must be a finite number of seconds, at least 0, got -1"),
        ({"seed": 0.5}, r"seed must be an integer, got 0.5"),
        ({"seed": -(2**63) - 1}, r"seed must fit into 64 bits, got -9223372036854775809"),
        ({"seed": True}, r"seed must be an integer, got True"),
    ],
)
def test_an_option_that_there_is_not_is_told(options, words):
    import user_functions

    with pytest.raises((TypeError, ValueError), match=rf"^study: .*{words}"):
        study(user_functions.rms, torch.ones(2, 2), torch.ones(2), **options)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("doubled", [torch.ones(2, dtype=torch.int64)], "a tensor of fp32, .*; give one, such as x=fp32"),
        ("rms", [torch.ones(2, 2)], "for every parameter .* got none for weight; give it, too"),
        ("whole", [torch.ones(4)], "differentiable for a backward pass; ask for fwd alone"),
    ],
)
def test_arguments_that_make_no_study_are_told_in_words_of_python(name, arguments, words, tmp_path):
    import user_functions

    with pytest.raises(ValueError, match=words) as caught:
        study(getattr(user_functions, name), *arguments, passes="bwd", out=tmp_path / "run")
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"providers": [3]}, TypeError, "providers must be a list of names, got 3; write"),
        ({"providers": 3}, TypeError, "providers must be a list of names, got 3; write"),
        ({"passes": ["fwd"]}, ValueError, r"pass must be one of fwd, bwd, fwd\+bwd, both, got \['fwd'\]; choose one"),
    ],
)
def test_options_of_other_types_are_told(options, error, words, tmp_path):
    with pytest.raises(error, match=words):
        study(torch.sigmoid, torch.ones(2), **options, out=tmp_path / "run")


def test_a_folder_with_a_run_is_told_in_words_of_python(tmp_path):
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(ValueError, match=r"out must be a new folder, got .* which has a run; choose another"):
        study(torch.sigmoid, torch.ones(2), out=tmp_path)


def test_a_study_does_not_start_inside_a_study(monkeypatch):
    monkeypatch.setitem(os.environ, WORKER, "1")
    with pytest.raises(RuntimeError, match="under `if __name__ == '__main__':`"):
        study(math.gamma, torch.ones(1))


def test_a_study_from_python_shows_itself(tmp_path):
    """End to end: values become specs, another process imports the function, a notebook gets a table."""
    import user_functions

    made = fusewise.study(
        user_functions.doubled, torch.randn(8, 8, requires_grad=True), providers=["eager"], rounds=3, warm=True, code=False,
        out=tmp_path / "run",
    )  # fmt: skip
    assert [(r.op, r.status, r.pass_) for r in made.rows] == [
        ("user_functions:doubled", "ok", "fwd"),
        ("user_functions:doubled", "ok", "bwd"),
    ]
    assert made.report.is_file()
    bundle = made._repr_mimebundle_()
    assert bundle["text/plain"] == repr(made)
    assert "eager" in bundle["text/plain"]


def test_a_study_of_a_function_that_does_not_tell_its_parameters(tmp_path):
    made = fusewise.study(
        torch.softmax, torch.randn(8, 8), 1, providers=["eager"], rounds=3, warm=True, code=False, out=tmp_path / "run"
    )
    assert [(r.op, r.case, r.status) for r in made.rows] == [("torch:softmax", "fp32[8,8] 1", "ok")]


def test_a_table_is_in_the_order_measured_and_has_reasons_below(tmp_path):
    why = "no kernel for this " * 30
    made = Result(
        study_record(
            [
                row("slow", device_us=2.0),
                row("quick", device_us=1.0),
                row("broken", status="failed", reason=why),
                row("slow", pass_="bwd", device_us=2.0),
                row("broken", pass_="bwd", status="failed", reason=f"\x1b[2J{why}"),
                row("absent", pass_="bwd", status="missing", reason="<not> here"),
            ]
        ),
        Path("report.html"),
    )
    head, *lines = repr(made).splitlines()
    table = [line.split()[2:5] for line in lines[:6]]
    assert table == [
        ["fwd", "quick", "1.00"],
        ["fwd", "slow", "2.00"],
        ["fwd", "broken", "failed"],
        ["bwd", "slow", "2.00"],
        ["bwd", "broken", "failed"],
        ["bwd", "absent", "missing"],
    ]
    assert max(map(len, [head, *lines[:6]])) < 100
    assert lines[6:] == [
        f"broken failed: {why}", f"broken failed: \ufffd[2J{why}", "absent missing: <not> here", "report: report.html",
    ]  # fmt: skip
    assert "<p>absent missing: &lt;not&gt; here</p>" in made._repr_html_()


def test_a_table_for_a_notebook_is_harmless():
    made = Result(study_record([row("<script>alert(1)</script>", case="a\u202eb")]), Path("report.html"))
    assert "<script>" not in made._repr_html_()
    assert "&lt;script&gt;" in made._repr_html_()
    assert "<td>a\ufffdb</td>" in made._repr_html_()
