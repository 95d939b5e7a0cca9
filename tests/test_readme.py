"""The figures of the README and of docs/results.md match the published rows, and the README's Python code runs."""

import functools
import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "docs" / "results.md"
PAGES = {page: page.read_text(encoding="utf-8") for page in (README, RESULTS)}


@functools.cache
def generator():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_are_those_of_the_rows():
    assert generator().filled(PAGES) == PAGES, "run python benchmarks/readme.py"


@pytest.mark.parametrize(("page", "figure"), [(README, r"\*\*0\.\d\d\*\*"), (RESULTS, r"\| \d\d % \|")])
def test_a_changed_figure_is_seen(page, figure):
    changed = re.sub(figure, "| 1 % |", PAGES[page], count=1)
    assert changed != PAGES[page]
    assert generator().filled(PAGES | {page: changed}) == PAGES


@pytest.mark.parametrize(("page", "name"), [(README, "h200-glance"), (RESULTS, "xeon")])
def test_a_lost_place_is_an_error(page, name):
    with pytest.raises(ValueError, match=f"<!-- {name} --> must stand once in README.md or docs/results.md, got 0"):
        generator().filled(PAGES | {page: PAGES[page].replace(f"<!-- {name} -->", "")})


@pytest.mark.parametrize(
    ("page", "pass_", "sentence"),
    [
        (README, "fwd", r"triton [\d.]+,\sDAY; B 4"),
        (RESULTS, "fwd", r"triton [\d.]+,\sDAY; B 4"),
        (RESULTS, "bwd", r"backward was measured on DAY"),
    ],
)
def test_the_day_of_the_models_is_that_of_their_rows(page, pass_, sentence):
    module = generator()
    found = [group for (case, _, of), group in module.groups("h200").items() if of == pass_ and module.published(case)]
    days = {row["run"][:8] for group in found for row in group.values()}
    told = re.search(sentence.replace("DAY", r"(\d{4})-(\d\d)-(\d\d)"), PAGES[page])
    assert {"".join(told.groups())} == days


class MLP(nn.Module):
    """Stands for the README's `model`: a transformers model, of which the code needs no more than this."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_its_python_runs():
    code = re.findall(r"```python\n(.*?)```", PAGES[README], flags=re.DOTALL)
    assert len(code) == 4
    names = {"model": MLP()}
    small = "\n".join(code).replace("4096", "64")  # for a CPU
    exec(compile(small, "README.md", "exec"), names)
    assert [replaced.type for replaced in names["handle"].replaced] == ["MLP"]


@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("learn/*.md"), *ROOT.glob("benchmarks/*.md")],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_what_a_page_links_to_is_there(page):
    text = re.sub(
        r"(?s)```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8")
    )  # in code, x[i](y) looks like a link
    for target, place in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        there = page.parent / target if target else page
        assert target.startswith("http") or there.exists(), target
        if place:
            headings = re.findall(r"^#+ (.*)", there.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert place in {re.sub(r"[^\w\s-]", "", h).lower().replace(" ", "-") for h in headings}, place


def test_the_rows_are_read_as_the_page_of_the_benchmarks_says(monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "benchmarks" / "README.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(compile(code, "benchmarks/README.md", "exec"), {})
    assert float(capsys.readouterr().out) > 1


@pytest.mark.parametrize("script", ["publish", "readme", "questions", "host_cost", "counters", "sanitize"])
def test_a_script_tells_its_use_and_does_nothing(script, tmp_path, monkeypatch, capsys):
    path = ROOT / "benchmarks" / f"{script}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {script}.py")
    assert not list(tmp_path.iterdir())
