"""The documentation of the commands matches the command line."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fusewise.cli import cli
from fusewise.lab import commands, plugin, targets
from fusewise.lab.code import commands as code_commands

DOCS = Path(__file__).parents[2] / "docs"
VERBS = (DOCS / "verbs.md").read_text(encoding="utf-8")
#: The page that documents each command's options.
PAGES = {
    "study": "study.md", "report": "report.md", "compare": "compare.md", "code": "code.md", "profile": "profile.md",
    "tune": "tune.md", "providers": "verbs.md", "limits": "verbs.md", "build": "verbs.md",
}  # fmt: skip
#: Documented once for several commands in study.md, or only in their help.
ELSEWHERE = {
    "--help",
    "--device",
    "--seed",
    "--timeout",
    "--target",
    "--json",
    "--out",
    "--pass",
    "--dtype",
    "--preset",
    "--case",
}


def test_every_verb_has_a_line_and_a_page_that_is_there() -> None:
    assert set(PAGES) == set(cli.commands)
    for verb, page in PAGES.items():
        assert f"| `fusewise {verb}` |" in VERBS
        assert f"fusewise {verb}" in (DOCS / page).read_text(encoding="utf-8")
    assert all((DOCS / link).is_file() for link in re.findall(r"\]\(([\w-]+\.md)\)", VERBS))


@pytest.mark.parametrize("verb", sorted(PAGES))
def test_a_verbs_options_are_on_its_page(verb: str) -> None:
    page = (DOCS / PAGES[verb]).read_text(encoding="utf-8")
    options = {
        o for p in cli.commands[verb].params if isinstance(p, click.Option) for o in p.opts if o.startswith("--")
    }
    missing = {option for option in options - ELSEWHERE if option not in page}
    assert not missing


def test_options_that_a_page_shows_are_the_verbs_own() -> None:
    for page in sorted(set(PAGES.values())):
        for line in re.findall(r"^fusewise .*", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE):
            verb, *rest = line.partition("#")[0].split()[1:]
            assert verb in cli.commands, line
            known = {o for p in cli.commands[verb].params for o in (*p.opts, *p.secondary_opts)}
            shown = {word.strip("[]").partition("=")[0] for word in rest if word.strip("[]").startswith("--")}
            assert shown <= known | {"--help"}, line


def shown() -> list[str]:
    """Every command that a page or help text shows for a built-in problem; users' own files do not exist here."""
    texts = [page.read_text(encoding="utf-8") for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))]
    texts += [command.epilog or "" for command in cli.commands.values()]
    lines = re.findall(r"^ *(fusewise (?:study|code|profile) [^#\n]*)", "\n".join(texts), re.MULTILINE)
    return sorted({line.strip() for line in lines if "my" not in line and "…" not in line})


@pytest.mark.parametrize("line", shown())
def test_a_command_that_is_shown_is_accepted(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class AcceptedError(Exception):
        pass

    def accepted(*_: object, **__: object) -> None:
        raise AcceptedError

    for module, name in (
        (commands, "run"),
        (commands, "case_listing"),
        (code_commands, "code"),
        (code_commands, "profile"),
    ):
        monkeypatch.setattr(module, name, accepted)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, shlex.split(line)[1:])
    assert isinstance(result.exception, AcceptedError), result.output


def test_study_names_every_preset_and_every_provider_that_is_measured() -> None:
    page = (DOCS / "study.md").read_text(encoding="utf-8")
    presets = {preset for name in targets.BUILT_IN for preset in targets.find(name).presets()}
    assert {preset for preset in presets if f"`{preset}`" not in page} == set()
    names = {entry.name for entry in plugin.known() if entry.where in plugin.BUILT_IN}
    told = {name for name in names if name.startswith("fusewise-") or f"`{name}`" in page}
    shortened = {
        "transformer_engine-unfused",
        "transformer_engine-fused",
        "floor-copy",
        "floor-launch",
        "floor-triton-launch",
    }
    assert names - told <= shortened


def test_measuring_says_how_much_of_each_preset_is_published() -> None:
    page = (DOCS / "measuring.md").read_text(encoding="utf-8")
    told = {preset: (int(n), int(of)) for preset, n, of in re.findall(r"`([\w-]+)`\s\((\d+) of (\d+)\)", page)}
    lines = (DOCS.parent / "benchmarks" / "baselines" / "h200.jsonl").read_text(encoding="utf-8").splitlines()
    published = {(row["op"], row["case"]) for row in map(json.loads, lines)}
    presets = {
        preset: (sum((op, case.name) in published for case in cases), len(cases))
        for op in targets.BUILT_IN
        for preset, cases in targets.find(op).presets().items()
        if not preset.endswith("-quick")
    }
    assert told == {preset: counts for preset, counts in presets.items() if counts[0]}
