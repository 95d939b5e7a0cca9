"""Files and modules that user functions come from, and what is refused before a study begins. Functions that are given from
Python, as in a notebook, are in test_user_python.py.
"""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from fusewise.lab import plan
from fusewise.lab.problem import Task
from fusewise.lab.process import WorkerProcess
from fusewise.lab.targets import user
from fusewise.lab.targets.functions import load
from fusewise.lab.targets.user import User
from fusewise.lab.targets.user_problem import UserProblem

pytestmark = pytest.mark.usefixtures("forked")

FILE = str(Path(__file__).with_name("user_functions.py"))
RMS = ("x=bf16[8,16]", "weight=bf16[16]")


def verified(target, **limits):
    """The target's first task, tried in its own process."""
    case = target.case()
    task = Task(target.name, case.name, case.dtypes[0], "fwd", "cpu", 0, target.detail(case))
    target.verify([task], **{"timeout": 300.0, "memory_limit": None, **limits})


def test_a_file_that_does_not_end_is_told(tmp_path):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(
        ValueError,
        match=r"got no answer: the worker process timed out after 5 s; .* under `if __name__.* a longer timeout$",
    ):
        verified(User(f"{tmp_path / 'endless.py'}:f", ["fp32[4]"]), timeout=5.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("number", r"number must return a tensor, .* got float"),
        ("crashes", "got no answer: the worker process was killed by SIGSEGV"),
        (
            "raises",
            r"must be importable and run on its inputs, got RuntimeError: it failed: … KeyError: 'tango'; run it",
        ),
    ],
)
def test_a_function_is_run_before_a_study_begins(name, words, tmp_path):
    request = plan.Request(target=f"{FILE}:{name}", inputs=["fp32[4]"], device="cpu")
    with pytest.raises(ValueError, match=rf"^study: .*{words}"):
        plan.options(request, tmp_path / "out")


def test_a_backward_that_is_not_there_is_left_out_unless_it_is_asked_for(tmp_path):
    request = plan.Request(target=f"{FILE}:whole", inputs=["fp32[4]"], device="cpu")
    assert [task.pass_ for task in plan.options(request, tmp_path / "out").tasks] == ["fwd"]
    both = dataclasses.replace(request, passes="both")
    assert [task.pass_ for task in plan.options(both, tmp_path / "out").tasks] == ["fwd", "bwd"]
    with pytest.raises(ValueError, match="must be differentiable for a backward pass; ask for fwd alone"):
        plan.options(dataclasses.replace(request, passes="bwd"), tmp_path / "out")


def test_a_file_that_starts_a_study_when_imported_is_told(tmp_path):
    (tmp_path / "starts.py").write_text(
        "import fusewise, torch\ndef f(x):\n    return x\nfusewise.study(f, torch.ones(2))\n"
    )
    with pytest.raises(ValueError, match=r"^study: must not be called while a study imports the file; put the call"):
        verified(User(f"{tmp_path / 'starts.py'}:f", ["fp32[4]"]))


def test_a_request_is_checked_in_a_process_of_its_own(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n")
    request = plan.Request(target=f"{tmp_path / 'broken.py'}:f", inputs=["fp32[4]"], device="cpu")
    with pytest.raises(
        ValueError, match=r"broken.py:f must be importable and run on its inputs, got ModuleNotFoundError"
    ):
        plan.options(request, tmp_path / "out")
    request = plan.Request(target=f"{FILE}:rms", inputs=["nope=fp32[4]"], device="cpu")
    with pytest.raises(ValueError, match="inputs must be among the parameters"):
        plan.options(request, tmp_path / "out")
    options = plan.options(plan.Request(target=f"{FILE}:rms", inputs=RMS, device="cpu"), tmp_path / "out")
    assert [(t.op, t.dtype, t.pass_) for t in options.tasks] == [
        ("user_functions.py:rms", "bf16", "fwd"),
        ("user_functions.py:rms", "bf16", "bwd"),
    ]


@pytest.mark.parametrize(
    ("target", "inputs", "words"),
    [
        ("no_such_file.py:f", ["fp32[4]"], "must be in a file that exists"),
        (":f", ["fp32[4]"], "must be FILE.py:NAME or MODULE:NAME"),
        (f"{FILE}:rms", [], "must have a tensor of fp32, bf16, fp16, c64 among its inputs"),
        ("rope", ["fp32[4]"], "inputs must be those of a function, got target 'rope'"),
    ],
)
def test_bad_targets_are_refused(target, inputs, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        plan.options(plan.Request(target=target, inputs=inputs, device="cpu"), tmp_path)


@pytest.mark.parametrize("fields", [{"preset": "rope-quick"}, {"cases": ["cube-8"]}])
def test_a_function_has_no_presets_and_cases(fields, tmp_path):
    request = plan.Request(target=f"{FILE}:doubled", inputs=["fp32[4]"], device="cpu", **fields)
    with pytest.raises(ValueError, match=r"a function must be given without --(preset|case), got"):
        plan.options(request, tmp_path)


def test_a_module_is_searched_for_where_the_study_was_started(tmp_path):
    (tmp_path / "my_own_module_of_functions.py").write_text("def f(x):\n    return x + 1\n")
    with pytest.raises(ModuleNotFoundError):
        load("my_own_module_of_functions:f")
    assert load("my_own_module_of_functions:f", path=[str(tmp_path)])(1) == 2


def test_what_a_module_holds_is_its_own_in_each_dtype(tmp_path):
    (tmp_path / "my_own_module_of_layers.py").write_text("import torch\nlayer = torch.nn.Linear(8, 8)\n")
    place = {"place": "my_own_module_of_layers:layer", "inputs": ["fp32[4,8]"], "path": [str(tmp_path)]}
    made = [UserProblem(Task("layer", "x", dtype, "fwd", "cpu", 0, place)) for dtype in ("bf16", "fp32")]
    assert [p.parameters[0].dtype for p in made] == [torch.bfloat16, torch.float32]
    assert torch.equal(made[0].parameters[0], made[1].parameters[0].bfloat16())


def test_a_file_of_a_package_may_import_its_neighbours(tmp_path):
    inner = tmp_path / "outer_pack" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner / "two.py").write_text("TWO = 2\n")
    (inner / "f.py").write_text("from .two import TWO\ndef f(x):\n    return x * TWO\n")
    verified(User(f"{inner / 'f.py'}:f", ["fp32[4]"]))
    assert load(f"{inner / 'f.py'}:f")(3) == 6


def test_a_package_is_executed_once_if_the_function_is_in_its_own_file(tmp_path, monkeypatch):
    """A second time would register its operators again."""
    package = tmp_path / "pack_with_a_function"
    package.mkdir()
    (package / "two.py").write_text("runs = []\n")
    (package / "__init__.py").write_text("from .two import runs\nruns.append(1)\ndef f():\n    return len(runs)\n")
    assert load(f"{package / '__init__.py'}:f")() == 1


def test_the_file_that_is_named_is_loaded_wherever_the_study_is_started(tmp_path, monkeypatch):
    for number, folder in enumerate(("here", "there")):
        package = tmp_path / folder / "pack_of_two_folders"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "f.py").write_text(f"def f(x):\n    return x * {number}\n")
    monkeypatch.chdir(tmp_path / "here")
    assert load(f"{tmp_path / 'there' / 'pack_of_two_folders' / 'f.py'}:f")(3) == 3


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 searches the working directory first")
def test_files_where_the_study_is_started_may_have_names_of_pythons_own_modules(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "mine.py").write_text("TWO = 2\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "f.py").write_text("from mine import TWO\ndef f(x):\n    return x * TWO\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(user, "WorkerProcess", WorkerProcess)  # started here
    verified(User("random.py:f", ["fp32[4]"]))
    verified(User("elsewhere/f.py:f", ["fp32[4]"]))


def test_a_file_of_any_name_is_a_module_that_a_program_can_name(tmp_path):
    file = tmp_path / "my-file.v2.py"
    file.write_text("def f(x):\n    return x\n")
    assert load(f"{file}:f").__module__.isidentifier()


def test_a_parameter_may_have_any_letters(tmp_path):
    options = plan.options(
        plan.Request(target=f"{FILE}:greek", inputs=["fp32[4]", "β=0.5"], device="cpu", passes="fwd"), tmp_path / "out"
    )
    assert options.tasks[0].case == "fp32[4] β=0.5"
