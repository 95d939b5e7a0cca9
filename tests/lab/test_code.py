"""Parsing of compiler output: source locations, instruction counts, memory accesses of kernels."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lab_code_fakes import Shown

import fusewise
from fusewise.lab import targets
from fusewise.lab.code import (
    commands,
    disassembly,
    graphs,
    inductor,
    locations,
    python,
    relax,
    thunder,
    triton_kernels,
    xla,
)
from fusewise.lab.code import worker as code_worker
from fusewise.lab.code.stage import Stage, foreign, short, tidy
from fusewise.lab.code.worker import Server
from fusewise.lab.ledger import Kernel, Ledger
from fusewise.lab.plugin import Run
from fusewise.lab.problem import Task

SOURCE = Path(fusewise.__file__).parents[1]


def test_a_stage_has_a_known_language() -> None:
    with pytest.raises(ValueError, match=r"code: language must be one of asm, .*, got 'cobol'"):
        Stage(stage="x", language="cobol", text="")


def test_a_terminal_obeys_nothing_that_a_provider_says_of_its_code() -> None:
    nasty = "\x1b[2J\x9b31m\r\x00"
    stage = {**Stage(stage=nasty, language="python", text="pass\n", part=nasty).entry("p", 0), "text": "pass\n"}
    shown = {"provider": "p", "status": "ok", "reason": "", "stages": [stage]}
    index = {"providers": [shown, {"provider": "q", "status": "failed", "reason": nasty, "stages": []}]}
    profiled = {"provider": "p", "status": "ok", "reason": "", "rows": [{}], "table": nasty, "ledger_reason": nasty}
    profiled["cache_bytes"] = 2**20
    kernels = (Kernel(name=nasty, read=1, written=1),)
    ledger = Ledger(op="gelu", case="c", dtype="fp32", pass_="fwd", provider="p", kernels=kernels).to_json()
    said = [commands.listing(index), commands.texts(index)]
    said += [commands.profile_text({**profiled, "ledger": found}) for found in (None, ledger)]
    assert all("[2J" in text for text in said)
    assert not {c for c in "".join(said) if not c.isprintable() and c != "\n"}


def test_a_stage_or_ledger_that_no_record_may_have_is_a_reason(tmp_path, monkeypatch) -> None:
    server = Server(Shown())
    task = Task("gelu", "gelu-5x5", "fp32", "fwd", "cpu", 0).to_json()
    asked = {"task": task, "target": "cpu", "folder": str(tmp_path)}
    assert server.answer({"do": "stages", **asked})["ok"] and server.answer({"do": "traffic", **asked})["ok"]
    broken = Stage(stage="text", language="python", text="", lines={0: "a.py:1"})
    monkeypatch.setattr(Shown, "stages", lambda *_: [broken])
    monkeypatch.setattr(Shown, "traffic", lambda *_: [Kernel(name="k", read=-1, written=0)])
    reasons = [server.answer({"do": do, **asked})["reason"] for do in ("stages", "traffic")]
    assert "lines.0: must match" in reasons[0] and "kernels[0].read: must be at least 0" in reasons[1]


def test_stages_of_long_names_have_files_of_their_own(tmp_path) -> None:
    """A file name has at most 255 bytes, some file systems allow 143; letters have up to 4."""
    parts = [f"{letters * 100}{end}" for letters in ("kernel_", "核", "𝕜/ ") for end in "ab"]
    stages = [Stage(stage="triton", language="python", text=part, part=part) for part in parts]
    files = [entry["file"] for entry in code_worker.write(stages, "p", tmp_path / "p")]
    assert [(tmp_path / file).read_text(encoding="utf-8") for file in files] == parts
    assert max(len(os.fsencode(Path(file).name)) for file in files) <= 143


def test_texts_do_not_depend_on_the_machine() -> None:
    text = f'"{SOURCE}/fusewise/cli.py", <code object f at 0x7f00deadbeef>, fn_1_718ff179_3c6d_4c96_8a50_1ae9ae263326'
    assert tidy(text) == '"fusewise/cli.py", <code object f>, fn_1_'
    assert short(f"{SOURCE}/fusewise/cli.py") == "fusewise/cli.py"
    assert short("/nowhere/x.py") == "/nowhere/x.py"
    # Paths from another checkout are shortened, wherever it is; here inside one of the folders that shorten paths.
    for checkout in (SOURCE, "/nowhere/src", f"{SOURCE}/build/lib"):
        assert short(f"{checkout}/fusewise/ops/rope/_triton.py") == "fusewise/ops/rope/_triton.py"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("triton/language/standard.py", True),
        ("torch/_tensor.py", True),
        ("fusewise/lab/code/xla.py", True),
        ("fusewise/lab/targets/gelu.py", False),
        ("fusewise/ops/rope/_triton_kernel.py", False),
        ("my_model.py", False),
    ],
)
def test_whose_file_it_is(path: str, expected: bool) -> None:
    assert foreign(path) is expected


MLIR = """\
#loc = loc("/src/mine.py":1:0)
#loc1 = loc("/lib/triton/language/standard.py":43:9)
#loc2 = loc("/src/mine.py":7:4)
module {
  tt.func public @k(%x: !tt.ptr<f32> loc("x"(#loc))) {
    %0 = tt.load %x : !tt.ptr<f32> loc(#loc5)
    %1 = arith.addf %0, %0 : f32 loc("/src/mine.py":9:1)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc3 = loc(callsite(#loc1 at #loc2))
#loc5 = loc("value"(#loc3))
"""


def test_mlir_shows_the_users_line_of_an_inlined_call() -> None:
    text, lines = locations.mlir(MLIR)
    assert "loc" not in text
    assert text.splitlines()[2] == "    %0 = tt.load %x : !tt.ptr<f32>"
    assert lines[3] == "/src/mine.py:7"  # not Triton's own file, which is the innermost frame
    assert lines[4] == "/src/mine.py:9"
    assert lines[5] == "/src/mine.py:1"


def test_llvm_follows_inlining() -> None:
    text, lines = locations.llvm(
        "define void @k() {\n"
        "  %1 = add i32 1, 2, !dbg !5\n"
        "  ret void\n"
        "}\n"
        '!1 = !DIFile(filename: "mine.py", directory: "/src")\n'
        '!2 = !DIFile(filename: "standard.py", directory: "/lib/triton/language")\n'
        '!3 = distinct !DISubprogram(name: "k", scope: !1, file: !1, line: 1)\n'
        '!4 = distinct !DISubprogram(name: "cdiv", scope: !2, file: !2, line: 9)\n'
        "!5 = !DILocation(line: 43, column: 9, scope: !4, inlinedAt: !6)\n"
        "!6 = !DILocation(line: 7, column: 4, scope: !3)\n"
    )
    assert "dbg" not in text and "DILocation" not in text
    assert lines == {2: "/src/mine.py:7"}


def test_ptx_places_hold_until_the_next() -> None:
    text, lines = locations.ptx(
        ".visible .entry k()\n{\n\t.loc\t1 3 0\n\tmov.u32 %r1, 1;\n\tadd.u32 %r1, %r1, 1;\n"
        "\t.loc\t2 43 9, function_name $x, inlined_at 1 7 4\n\tret;\n}\n"
        '\t.file\t1 "/src" "mine.py"\n\t.file\t2 "/lib/triton/language" "standard.py"\n\t.section\t.debug_abbrev\n\t{\n\t.b8 1\n'
    )
    assert text == ".visible .entry k()\n{\n\tmov.u32 %r1, 1;\n\tadd.u32 %r1, %r1, 1;\n\tret;\n}\n"
    assert lines == {3: "/src/mine.py:3", 4: "/src/mine.py:3", 5: "/src/mine.py:7"}


SASS = """\
\t.section\t.text.first,"ax",@progbits
\t.sectionflags\t@"SHF_BARRIERS=1"
first:
\t//## File "/lib/triton/language/standard.py", line 43 inlined at "/src/mine.py", line 7
\t//## File "/src/mine.py", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
\t//## File "/src/mine.py", line 9
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0030*/                   STG.E.U16 desc[UR4][R2.64], R5 ;
.L_x_0:
        /*0040*/                   STL.64 [R1], R2 ;
        /*0050*/                   LDL R2, [R1] ;
        /*0060*/                   NOP ;
\t.section\t.text.second,"ax",@progbits
        /*0000*/                   EXIT ;
\t.section\t.debug_line
        /*0000*/                   LDG.E R1, R2 ;
"""


def test_one_kernel_of_a_ptx_module_with_the_modules_head_and_files() -> None:
    module = (
        "//\n.version 9.0\n.target sm_90\n.address_size 64\n\n"
        ".entry first(\n\t.param .b64 a\n)\n{\n\t.loc\t1 7 0\n\tret;\n}\n"
        ".visible .entry second(\n\t.param .b64 a\n)\n.maxntid 128, 1, 1\n{\n\t.loc\t1 9 0\n\tmov.u32 %r1, 0;\n\tret;\n}\n"
        '\t.file\t1 "/src/kernel.cu"\n'
    )
    (stage,) = disassembly.ptx(module, "sm_90", {"second": "the second"})
    assert (stage.stage, stage.part, stage.target) == ("ptx", "the second", "sm_90")
    assert ".version 9.0" in stage.text and "second(" in stage.text and "first" not in stage.text
    (place,) = {stage.lines[n] for n, line in enumerate(stage.text.splitlines(), start=1) if "mov.u32" in line}
    assert place == "/src/kernel.cu:9"
    assert disassembly.ptx(module, "sm_90", {}) == []


def test_sass_without_comments_and_with_places() -> None:
    text, lines = locations.sass(SASS, "first")
    assert "File" not in text and "EXIT" not in text and ".L_x_0:" in text
    assert lines[2] == "/src/mine.py:7" and lines[4] == "/src/mine.py:9"
    both, _ = locations.sass(SASS)
    assert "EXIT" in both and both.count("LDG") == 1


def test_instructions_are_counted() -> None:
    assert disassembly.count_sass(locations.sass(SASS)[0]) == {
        "instructions": 7, "spill_loads": 1, "spill_stores": 1, "LDG.128": 1, "HGMMA": 1, "STG.16": 1,
    }  # fmt: skip
    atomics = (
        "ATOM.E.ADD.STRONG.GPU",
        "ATOMG.E.CAS.STRONG.GPU",
        "ATOMS.ADD",
        "RED.E.ADD.STRONG.GPU",
        "REDG.E.ADD.F32x2.FTZ.RN",
    )
    counts = disassembly.count_sass("".join(f"        /*0370*/                   {name} R2 ;\n" for name in atomics))
    assert all(counts[name.partition(".")[0]] == 1 for name in atomics)  # on Hopper, reductions are REDG


def test_resources_are_the_largest_of_all_kernels() -> None:
    usage = "Function a:\n REG:32 STACK:0 SHARED:1024 LOCAL:0\n Function b:\n REG:40 STACK:8 SHARED:0 LOCAL:16\n"
    assert disassembly.resources(usage) == {
        "registers": 40, "stack_bytes": 8, "shared_bytes": 1024, "local_bytes": 16,
    }  # fmt: skip


def test_assembly_is_counted_by_width() -> None:
    text = (
        "0000 <f>:\n   0:\tvmovups (%rdi),%zmm0\n   6:\tvfmadd213ps %zmm1,%zmm0,%zmm0\n   c:\tcall 10 <g>\n  11:\tret\n"
    )
    assert disassembly.count_assembly(text) == {"instructions": 4, "fma": 1, "calls": 1, "vector_512": 2}


ACCESSES = """\
module {
  tt.func public @k(%a: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("a"), %b: !tt.ptr<f32>, %c: !tt.ptr<f32>, %d: !tt.tensordesc<tensor<8xf32>>, %n: i32) {
    %p = tt.splat %a : !tt.ptr<f32> -> tensor<8x!tt.ptr<f32>>
    %q = tt.splat %b : !tt.ptr<f32> -> tensor<8x!tt.ptr<f32>>
    %0:2 = scf.for %i = %x to %n step %y iter_args(%now = %p, %to = %q) -> (tensor<8x!tt.ptr<f32>>, tensor<8x!tt.ptr<f32>>)  : i32 {
      %1 = tt.load %now : tensor<8x!tt.ptr<f32>>
      tt.store %to, %1 : tensor<8x!tt.ptr<f32>>
      %2 = tt.addptr %now, %k : tensor<8x!tt.ptr<f32>>, tensor<8xi32>
      %3 = tt.addptr %to, %k : tensor<8x!tt.ptr<f32>>, tensor<8xi32>
      scf.yield %2, %3 : tensor<8x!tt.ptr<f32>>, tensor<8x!tt.ptr<f32>>
    }
    scf.if %t {
      %p = tt.descriptor_load %d[%x] : !tt.tensordesc<tensor<8xf32>> -> tensor<8xf32>
    } else {
      %p = tt.atomic_rmw fadd, acq_rel, gpu, %b, %v, %m : (!tt.ptr<f32>, f32, i1) -> f32
    }
    tt.return
  }
}
"""


def test_pointers_are_followed_to_loads_and_stores() -> None:
    assert triton_kernels.accesses(ACCESSES) == {
        "a": (True, False), "b": (True, True), "c": (False, False), "d": (True, False),
    }  # fmt: skip


WARPS = """\
module {
  tt.func public @k(%x_map: !tt.tensordesc<8x8xbf16, #shared>, %b: !tt.ptr<f32>, %y_map: !tt.tensordesc<8x8xbf16, #shared>) {
    ttg.warp_specialize(%y_map, %ring, %b, %x_map) attributes {requestedRegisters = array<i32: 240, 24>}
    default {
      %v = tt.load %b : !tt.ptr<f32>
      ttg.warp_yield
    }
    partition0(%arg0: !tt.tensordesc<8x8xbf16>, %arg1: !ttg.memdesc<4x8xbf16>, %arg2: !tt.ptr<f32>, %arg3: !tt.tensordesc<8x8xbf16>) num_warps(4) {
      ttng.async_tma_copy_local_to_global %arg0[%i, %j] %arg1 : !tt.tensordesc<8x8xbf16>
      ttg.warp_return
    }
    partition1(%arg0: !tt.tensordesc<8x8xbf16> loc("y"(#loc)), %arg1: !ttg.memdesc<4x8xbf16>, %arg2: !tt.ptr<f32>, %arg3: !tt.tensordesc<8x8xbf16>) num_warps(1) {
      ttng.async_tma_copy_global_to_local %arg3[%i, %j] %arg1, %full, %true : !tt.tensordesc<8x8xbf16>
      ttg.warp_return
    } : (!tt.tensordesc<8x8xbf16>) -> ()
    tt.return
  }
}
"""


def test_pointers_are_followed_into_groups_of_warps() -> None:
    assert triton_kernels.accesses(WARPS) == {"x_map": (True, False), "b": (True, False), "y_map": (False, True)}


@pytest.mark.parametrize("target", ["cpu", "90", "sm_", "sm_9", "gfx942"])
def test_targets_are_gpus(target: str) -> None:
    with pytest.raises(ValueError, match="code: target must be a GPU like sm_90, got"):
        triton_kernels.capability(target)


def test_bytecode_keeps_its_lines() -> None:
    def double(x: int) -> int:
        y = x + x
        return y

    (stage,) = [s for s in python.stages(double) if s.stage == "bytecode"]
    first = double.__code__.co_firstlineno
    added = next(n for n, line in enumerate(stage.text.splitlines(), start=1) if "BINARY" in line)
    assert stage.lines[added].endswith(f"test_code.py:{first + 1}")
    assert stage.counts["instructions"] == len(stage.text.splitlines()) - 1


def test_the_functions_that_a_function_calls_are_shown() -> None:
    parts = python.functions(targets.problem_for(Task("rope", "cube-4", "fp32", "fwd", "cpu", 0)).program().function)
    assert {"half", "rotate_half"} <= {part.__name__ for part in parts}
    text = python.source(parts).text
    assert "def rotate_half" in text and "def cat" not in text


def test_a_variable_that_was_never_set_hides_no_function() -> None:
    def shift(x: int) -> int:
        return x + 1

    def shifted(x: int) -> int:
        return shift(x) if x else unset(x)

    if not callable(shift):
        unset = shift
    assert python.functions(shifted) == [shifted, shift]


def test_comments_of_graphs_give_places() -> None:
    lines = graphs.comments(
        "def f():\n    # File: mine.py:7 in g, code: y\n    y = 1\n    z = 2\n\n    w = 3\n    # other\n"
    )
    assert lines == {2: "mine.py:7", 3: "mine.py:7", 4: "mine.py:7"}


def test_inductors_kernels_are_taken_out_of_its_code() -> None:
    code = (
        "import torch\n# Graph fragment:\n#   %mul : Tensor = call_function[target=torch.ops.aten.mul](...)\n"
        "k0 = async_compile.triton('k0', '''\nimport triton\ndef k0(): pass\n''', device_str='cuda')\n\n"
        "k1 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''\n#include <x>\nvoid kernel() {}\n''')\n\n"
        "def call(args):\n    k0.run()\n\n\ndef get_args():\n    pass\n"
    )
    kernels, wrapper = inductor.split(code)
    assert [(name, language) for name, language, _ in kernels] == [("k0", "python"), ("k1", "cpp")]
    assert kernels[0][2].startswith("# Graph fragment") and "def k0" in kernels[0][2]
    assert "void kernel" in kernels[1][2] and "import torch" not in kernels[1][2]
    assert "def call" in wrapper and "void kernel" not in wrapper and "get_args" not in wrapper
    assert inductor._lines(kernels[0][2], {"mul": "mine.py:7"}) == dict.fromkeys(range(1, 5), "mine.py:7")


def test_lower_stages_lead_through_the_generated_file() -> None:
    generated = {3: "mine.py:7", 4: "k0.py:4"}
    lines = {1: "/tmp/torchinductor_me/ab/x.py:3", 2: "x.py:4", 3: "other/y.py:3"}
    assert inductor._through(lines, generated) == {1: "mine.py:7", 2: "k0.py:4", 3: "other/y.py:3"}


HLO = """\
HloModule jit_f

FileNames
1 "/src/mine.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%fused (p: f32[8]) -> f32[8] {
  ROOT %m = f32[8]{0} multiply(%p, %p)
}

ENTRY %main (x: f32[64,32], w: bf16[48]) -> f32[64,32] {
  %x = f32[64,32]{1,0} parameter(0)
  %w = bf16[48]{0} parameter(1)
  %pair.1 = (f32[64,32]{1,0}, s32[4]{0}) fusion(%x, %w, %x), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/mul" stack_frame_id=1}
  %first = f32[64,32]{1,0} get-tuple-element(%pair.1), index=0
  ROOT %copy.2 = f32[64,32]{1,0} copy(%first)
}
"""


def test_hlo_places_and_traffic() -> None:
    text, lines = xla.hlo(HLO)
    assert "FileNames" not in text and text.startswith("HloModule jit_f\n\n%fused")
    fusion = next(n for n, line in enumerate(text.splitlines(), start=1) if "kind=kLoop" in line)
    assert lines == {fusion: "/src/mine.py:7"}
    pair, copy = xla.instructions(HLO)
    assert (pair.name, pair.read, pair.written) == ("pair", 64 * 32 * 4 + 48 * 2, 64 * 32 * 4 + 4 * 4)
    assert (copy.name, copy.read, copy.written) == ("copy", 64 * 32 * 4, 64 * 32 * 4)


@pytest.mark.parametrize(("shape", "size"), [("f32[]", 4), ("pred[8]{0}", 8), ("bf16[2,3]{1,0}", 12), ("s4[3]", 2), ("f8e4m3fn[4]", 4), ("()", 0)])  # fmt: skip
def test_hlo_shapes(shape: str, size: int) -> None:
    assert xla.size(shape) == size


def test_what_inductor_leaves_to_pytorch_may_be_a_view() -> None:
    def scheduled(overload: Any, read: int, written: int) -> Any:
        return SimpleNamespace(
            node=SimpleNamespace(op_overload=overload, python_kernel_name=f"torch.ops.{overload}"), is_extern=lambda: True,
            get_nodes=list,
            get_read_write_buffer_accesses=lambda include_reads, include_writes: {"x": read if include_reads else written},
        )  # fmt: skip

    aten = torch.ops.aten
    nodes = [scheduled(aten.view_as_real.default, 64, 0), scheduled(aten._conj.default, 64, 0), scheduled(aten.sort.default, 64, 96)]  # fmt: skip
    kernels = inductor.traffic(SimpleNamespace(scheduler=SimpleNamespace(nodes=nodes)))
    assert [(k.name, k.read, k.written) for k in kernels] == [("torch.ops.aten.sort.default", 64, 96)]


def test_relax_calls() -> None:
    pytest.importorskip("tvm")
    from tvm import relax as tvm_relax
    from tvm import topi

    builder = tvm_relax.BlockBuilder()
    x, w = (tvm_relax.Var(n, tvm_relax.TensorType((64, 32), d)) for n, d in (("x", "float32"), ("w", "bfloat16")))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            narrow = builder.emit_te(topi.cast, x, "bfloat16")
            square = builder.emit_te(topi.multiply, narrow, narrow)
            flat = builder.emit_te(topi.reshape, builder.emit_te(topi.add, square, w), (2048,))  # a view
            order = builder.emit_output(tvm_relax.op.argsort(flat, dtype="int64"))  # implemented by a library call
        builder.emit_func_output(order)
    found = [(k.name, k.read, k.written) for k in relax.calls(builder.get(), tvm_relax)]
    size = 64 * 32
    assert found == [
        ("cast", 4 * size, 2 * size), ("multiply", 2 * size, 2 * size), ("add", 4 * size, 2 * size), ("argsort", 2 * size, 8 * size),
    ]  # fmt: skip


def test_thunder_views() -> None:
    """A kernel that reads an expanded tensor, or the unchanged result of `to`, is charged for its storage."""
    dtype = SimpleNamespace(bytes=4)
    one, wide, kept, total = (SimpleNamespace(name=n, shape=s, dtype=dtype) for n, s in (("one", ()), ("wide", (8, 8)), ("kept", (8, 8)), ("total", (8, 8))))  # fmt: skip

    def bound(name: str, arguments: list[Any], result: Any, *within: Any) -> Any:
        return SimpleNamespace(
            sym=SimpleNamespace(name=name), flat_args=arguments, flat_outs=[result], subsymbols=within
        )

    symbols = [
        bound("update_aliases", [one], SimpleNamespace(name="same", shape=(), dtype=dtype)),
        bound("expand", [one], wide),
        bound("to", [wide], kept, bound("to", [wide], kept, bound("shallow_copy", [wide], kept))),
        bound("add", [wide, kept], total),
        bound("to", [total], one, bound("convert_element_type", [total], one)),
    ]
    held: dict[str, int] = {}
    kernels = [kernel for symbol in symbols if (kernel := thunder._kernel(symbol, held))]
    assert [(k.name, k.read, k.written) for k in kernels] == [("add", 8, 256), ("to", 256, 4)]


def test_thunder_without_a_backward_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a function that returns its argument."""
    traces = SimpleNamespace(last_traces=lambda _: [], last_backward_traces=lambda _: [])
    monkeypatch.setitem(sys.modules, "thunder", traces)
    monkeypatch.setattr(thunder.passes, "once", lambda *_: None)
    problem: Any = SimpleNamespace(task=Task("gelu", "gelu-5x5", "fp32", "bwd", "cpu", 0))
    assert thunder.traffic(problem, Run(lambda x: x)) == []


def test_a_missing_tool_says_what_brings_it(tmp_path: Path) -> None:
    with mock.patch("shutil.which", return_value=None), pytest.raises(disassembly.NoDisassembler, match="binutils"):
        disassembly.library(tmp_path / "x.so")
