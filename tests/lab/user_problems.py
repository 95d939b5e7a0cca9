"""Problems of the functions in user_functions.py, and of others by `file:name`."""

from pathlib import Path

from fusewise.lab.plugin import Run
from fusewise.lab.problem import Task
from fusewise.lab.targets.user import User
from fusewise.lab.targets.user_problem import UserProblem

FILE = str(Path(__file__).with_name("user_functions.py"))
COMPILED = str(Path(__file__).with_name("user_compiled.py"))
WRITERS = str(Path(__file__).with_name("user_writers.py"))


def problem(name, *texts, dtype="fp32", pass_="fwd", seed=0):
    target = User(name if ":" in name else f"{FILE}:{name}", texts)
    return UserProblem(Task(target.name, target.case().name, dtype, pass_, "cpu", seed, target.detail(target.case())))


def eager(p):
    program = p.program()
    return Run(program.function, program.enter, program.leave)


RMS = ("x=bf16[8,16]", "weight=bf16[16]")
