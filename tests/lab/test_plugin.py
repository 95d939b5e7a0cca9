import importlib.metadata

import pytest
from lab_fakes import Right

from fusewise.lab import Missing, commands, plugin, targets
from fusewise.lab.problem import Task
from fusewise.lab.targets.rope import RopeProblem


def test_built_in_providers_are_known_and_named_once():
    names = [entry.name for entry in plugin.known()]
    for op in targets.names():
        of_op = [e.name for e in plugin.known() if not e.provider.ops or op in e.provider.ops]
        assert len(of_op) == len(set(of_op))
    assert {"eager", "torchscript", "torch.compile", "fusewise-cpu", "fusewise-reference", "fusewise-triton"} <= set(
        names
    )
    assert {"liger", "flash_attn", "vllm", "flashinfer", "quack", "unsloth"} <= set(names)
    assert {"transformer_engine-fused", "transformer_engine-unfused", "floor-copy", "floor-launch"} <= set(names)
    assert all(entry.provider is not None for entry in plugin.known())


def test_missing_packages_say_what_to_install():
    for entry in plugin.known():
        if entry.provider.module and not plugin.installed(entry.provider.module):
            with pytest.raises(Missing, match=r"is not installed; .*pip install"):
                entry.provider.check(entry.provider.devices[-1])


def test_a_device_that_it_cannot_use_is_said():
    triton = next(e.provider for e in plugin.known() if e.name == "fusewise-triton")
    with pytest.raises(Missing, match="runs on cuda only, not on cpu"):
        triton.check("cpu")


def test_default_selection_leaves_out_the_opt_in_ones():
    default = {entry.name for entry in plugin.select(None, "rope", "cpu")}
    assert "fusewise-cpu" in default
    assert "fusewise-cpu-inplace" not in default
    assert [e.name for e in plugin.select(["fusewise-cpu-inplace", "eager"], "rope", "cpu")] == [
        "fusewise-cpu-inplace",
        "eager",
    ]


def test_a_provider_is_measured_once_however_often_it_is_named():
    assert [e.name for e in plugin.select(["eager", "floor-copy", "eager"], "rope", "cpu")] == ["eager", "floor-copy"]


@pytest.mark.parametrize(("names", "words"), [([], "one name at least"), ("eager", r"a list .*write \['eager'\]")])
def test_no_provider_and_no_list_are_refused(names, words):
    with pytest.raises(ValueError, match=f"^study: providers must be {words}"):
        plugin.select(names, "rope", "cpu")


def test_a_provider_may_be_named_by_its_place():
    (entry,) = plugin.select(["lab_fakes:Right"], "rope", "cpu")
    assert isinstance(entry.provider, Right)


@pytest.mark.parametrize(
    ("name", "op", "fix"),
    [
        ("nosuch", "rope", "choose one"),
        ("egaer", "rope", "try 'eager' or 'liger'"),
        ("inplace", "rope", "try 'fusewise-cpu-inplace' or 'fusewise-triton-inplace' or 'fusewise-cuda-inplace'"),
        ("torchcompile", "rope", "try 'torch.compile' or 'thunder-torchcompile' or 'torch.compile-max-autotune'"),
        ("cpu", "rope", "try 'fusewise-cpu' or 'fusewise-cpu-inplace'"),
        ("cpu", "geglu", "try 'fusewise-cpu' or 'fusewise-cpu-recompute'"),
        ("cpu", "gelu", "choose one"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_may_be_meant(name, op, fix):
    with pytest.raises(
        ValueError, match=r"^study: providers must be among those of `fusewise providers`, got "
    ) as caught:
        plugin.select([name], op, "cpu")
    assert str(caught.value).endswith(f"got {name!r}; {fix}")


def test_two_providers_of_one_name_are_refused():
    with pytest.raises(
        ValueError,
        match=r"^study: providers must have names of their own, got 'eager' at fusewise\.lab\.providers\.pytorch:Eager and "
        "lab_fakes:Namesake; leave one out",
    ):
        plugin.select(["eager", "lab_fakes:Namesake"], "rope", "cpu")
    assert [e.where for e in plugin.select(["lab_fakes:Namesake"], "rope", "cpu")] == ["lab_fakes:Namesake"]


def test_an_installed_namesake_costs_its_own_row(monkeypatch):
    points = [importlib.metadata.EntryPoint("mine", "lab_fakes:Namesake", plugin.ENTRY_POINTS)] * 2
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: points)
    entries = plugin.select(None, "rope", "cpu")
    assert len({e.name for e in entries}) == len(entries)
    assert next(e for e in entries if e.name == "eager").provider is not None
    (namesake,) = [e for e in entries if e.where == "lab_fakes:Namesake"]
    assert (namesake.name, namesake.provider) == ("lab_fakes:Namesake", None)
    assert "its name must be its own, got 'eager', which fusewise.lab.providers.pytorch:Eager has" in namesake.problem


@pytest.mark.parametrize(
    ("name", "where", "note"),
    [
        ("eager", "cpu", ""),
        ("torch.compile-max-autotune", "cpu", "measured only if named with --providers"),
        ("torch.compile-max-autotune", "cuda:0", "measured only if named with --providers, except for geglu"),
        ("thunder-torchcompile", "cpu", "for rope, measured only if named with --providers"),
        ("fusewise-cpu-inplace", "cpu", "measured only if named with --providers"),
    ],
)
def test_what_is_measured_when_named_alone_is_said(name, where, note):
    (entry,) = plugin.select([name], "rope", where)
    assert commands.named_only(entry.provider, where) == note


def test_an_installed_provider_that_raises_costs_its_own_line(monkeypatch):
    names = ("BrokenCheck", "BrokenVersions", "BrokenChoice")
    points = [importlib.metadata.EntryPoint(name, f"lab_fakes:{name}", plugin.ENTRY_POINTS) for name in names]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: points)
    states = {e["provider"]: (e["state"], e["note"]) for e in commands.provider_states("cpu")}
    assert states["broken-check"] == ("broken", "RuntimeError: cannot even look")
    assert states["broken-choice"] == ("broken", "RuntimeError: cannot choose")
    assert states["broken-versions"] == ("broken", "RuntimeError: knows no version")
    problems = {e.name: e.problem for e in plugin.select(None, "rope", "cpu")}
    assert problems["broken-choice"] == "RuntimeError: cannot choose"
    assert problems["broken-check"] == problems["eager"] == ""


@pytest.mark.parametrize("name", ["", "a,b", "a:b", "eager#2", "a\nb", "\ud800", "x" * 201, 3])
def test_a_name_is_one_that_rows_and_the_command_line_can_have(name, monkeypatch):
    monkeypatch.setattr(Right, "name", name)
    (entry,) = plugin.select(["lab_fakes:Right"], "rope", "cpu")
    assert (entry.name, entry.provider) == ("lab_fakes:Right", None)
    assert entry.problem.startswith("ValueError: provider: name must be 1 to 200 printable characters")


@pytest.mark.parametrize("where", ["no_such_module:X", "lab_fakes:Nothing", "lab_fakes:not_a_provider"])
def test_a_broken_plugin_is_an_entry_with_its_reason(where):
    (entry,) = plugin.select([where], "rope", "cpu")
    assert entry.provider is None
    assert entry.problem


def test_a_plugin_that_ends_its_process_is_an_entry_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    (entry,) = plugin.select(["leaving:X"], "rope", "cpu")
    assert (entry.provider, entry.problem) == (None, "SystemExit: 0")


def test_an_installed_package_adds_a_provider_by_entry_point(tmp_path, monkeypatch):
    """A complete third-party package: its metadata and a class."""
    package = tmp_path / "third_party.py"
    package.write_text(
        "import torch\n"
        "from fusewise.lab import Provider, Run, Unsupported\n"
        "class Sincere(Provider):\n"
        "    name = 'third-party'\n"
        "    packages = ('third-party',)\n"
        "    def build(self, problem):\n"
        "        if problem.op != 'rope':\n"
        "            raise Unsupported('rope only')\n"
        "        return Run(lambda *xs: problem.eager(xs))\n"
    )
    metadata = tmp_path / "third_party-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text(
        "[fusewise.providers]\nsincere = third_party:Sincere\nbroken = third_party:Gone\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = {entry.name: entry for entry in plugin.known()}
    assert found["third-party"].provider.versions() == {"third-party": "1.2"}
    assert "Gone" in found["broken"].problem
    problem = RopeProblem(Task("rope", "cube-4", "fp32", "fwd", "cpu", 0))
    assert found["third-party"].provider.build(problem).call(*problem.tensors)[0].shape == (4, 4, 4, 4)


def test_any_failure_of_an_import_is_a_reason():
    with pytest.raises(Missing, match=r"import no_such_module_anywhere failed: ModuleNotFoundError: .*; pip install x"):
        plugin.require("no_such_module_anywhere", "pip install x")


def test_who_has_a_package_is_not_told_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "made_for_another_torch.py").write_text("import torch\ntorch.Tensor.is_no_more\n")
    monkeypatch.syspath_prepend(tmp_path)
    told = r"has no attribute 'is_no_more'; the version that is installed does not work here, try another$"
    with pytest.raises(Missing, match=told):
        plugin.require("made_for_another_torch", "pip install made-for-another-torch")
