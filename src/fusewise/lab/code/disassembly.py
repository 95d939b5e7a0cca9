"""Disassembles machine code and counts what matters in it: registers, spills, load widths, tensor-core instructions."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from . import locations
from .stage import Stage

TIMEOUT_S = 120
_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
#: Tensor-core instructions: per warp group (Hopper), per warp (since Volta), and their integer and 8-bit variants.
TENSOR_CORES = ("HGMMA", "QGMMA", "IGMMA", "BGMMA", "HMMA", "IMMA", "DMMA", "QMMA", "OMMA", "UTCHMMA", "UTCQMMA")
#: Loads and stores of global and shared memory, counted by bits per thread: `LDG.128`.
SIZED = ("LDG", "STG", "LDS", "STS", "LD", "ST", "LDGSTS")
#: Counted by name: TMA copies, matrix loads from shared memory, atomics, special functions, barriers.
NAMED = (
    "UTMALDG", "UTMASTG", "UBLKCP", "LDSM", "STSM", "RED", "REDG", "ATOM", "ATOMG", "ATOMS", "MUFU", "BAR", "SYNCS",
)  # fmt: skip


class NoDisassembler(RuntimeError):
    """A tool is not installed; the message says which, and where it comes from."""


def tool(name: str) -> str:
    """The path of `cuobjdump` or `nvdisasm`: the one bundled with Triton, else from PATH."""
    try:
        import triton

        path = getattr(triton.knobs.nvidia, name).path
    except (ImportError, AttributeError, RuntimeError):
        path = shutil.which(name)
    if path is None:
        raise NoDisassembler(f"{name} is not installed; it comes with triton and with the CUDA toolkit")
    return str(path)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def architectures() -> list[int]:
    """The GPUs whose machine code nvdisasm reads, 90 for sm_90, ascending; none where it is not installed."""
    try:
        text = _run(tool("nvdisasm"), "--help")
    except (RuntimeError, OSError):  # NoDisassembler is one
        return []
    return sorted({int(number) for number in re.findall(r"'SM(\d+)'", text)})


def sass(cubin: bytes, part: str, target: str) -> Stage:
    """The SASS of a cubin, mapped to source lines, with instruction and resource counts."""
    (stage,) = functions(cubin, target, {"": part})
    return stage


def functions(cubin: bytes, target: str, parts: Mapping[str, str]) -> list[Stage]:
    """The SASS of some functions of a cubin. `parts`: function name (empty: all) -> display name."""
    with tempfile.TemporaryDirectory(prefix="fusewise-code-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        listing = _run(tool("nvdisasm"), "-c", "-gi", str(path))
        usage = _run(tool("cuobjdump"), "-res-usage", str(path))
    found = []
    for function, part in parts.items():
        text, lines = locations.sass(listing, function)
        own = usage if not function else usage.partition(f"Function {function}:")[2].partition("Function ")[0]
        found.append(
            Stage(
                stage="sass", language="sass", text=text, part=part, target=target, lines=lines,
                counts={**resources(own), **count_sass(text)},
            )
        )  # fmt: skip
    return found


def ptx(text: str, target: str, parts: Mapping[str, str]) -> list[Stage]:
    """Some kernels of a PTX module, each with the module's header. `parts`: kernel name -> display name."""
    head = text[: text.index("\n", text.index(".address_size")) + 1]
    files = "".join(line + "\n" for line in text.splitlines() if re.match(r"\s*\.file\s", line))
    found = []
    for function in re.finditer(
        r"^(?:\.\w+ )*\.entry (\w+)\(.*?^\}$(?!\s*// end inline asm)", text, re.MULTILINE | re.DOTALL
    ):
        if function[1] in parts:
            alone, lines = locations.ptx(f"{files}{head}\n{function[0]}\n")
            part = parts[function[1]]
            found.append(Stage(stage="ptx", language="ptx", text=alone, part=part, target=target, lines=lines))
    return found


def names(cubin: bytes) -> list[str]:
    """Names of a cubin's kernels."""
    with tempfile.TemporaryDirectory(prefix="fusewise-code-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return re.findall(r"Function (\S+):", _run(tool("cuobjdump"), "-res-usage", str(path)))


def resources(usage: str) -> dict[str, int]:
    """Resource usage from `cuobjdump -res-usage`: the maximum over its kernels."""
    names = {"REG": "registers", "STACK": "stack_bytes", "SHARED": "shared_bytes", "LOCAL": "local_bytes"}
    found: dict[str, int] = {}
    for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage):
        found[names[key]] = max(found.get(names[key], 0), int(value))
    return found


def count_sass(text: str) -> dict[str, int]:
    """Performance-relevant instructions of a SASS listing. Spills are loads and stores of local memory."""
    counts: Counter[str] = Counter(instructions=0, spill_loads=0, spill_stores=0)
    for opcode in _SASS.findall(text):
        name, *modifiers = opcode.split(".")
        counts["instructions"] += name != "NOP"
        counts["spill_loads"] += name == "LDL"
        counts["spill_stores"] += name == "STL"
        if name in SIZED:
            counts[f"{name}.{_bits(modifiers)}"] += 1
        elif name in TENSOR_CORES or name in NAMED:
            counts[name] += 1
    return dict(counts)


def _bits(modifiers: list[str]) -> int:
    for modifier in modifiers:
        if modifier in ("64", "128", "256"):
            return int(modifier)
        if modifier in ("U8", "S8"):
            return 8
        if modifier in ("U16", "S16"):
            return 16
    return 32


_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
_INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\s+(?:(?:lock|rep|repz|repnz|bnd|notrack)\s+)*(\S+)\s*(.*)$")
#: What the C runtime's start-up files add to every library.
_RUNTIME = re.compile(
    r"^(_init|_fini|\.plt.*|.*@plt|deregister_tm_clones|register_tm_clones|__do_global_dtors_aux|frame_dummy|_start)$"
)


def library(path: Path, other_than: str = "", only: str = "", part: str = "") -> Stage:
    """The machine code of a shared library: its own functions, restricted to names that match `only` and not
    `other_than`."""
    objdump = shutil.which("objdump")
    if objdump is None:
        raise NoDisassembler("objdump is not installed; it comes with binutils")
    kept: list[str] = []
    wanted = False
    for line in _run(objdump, "-d", "-C", "--no-show-raw-insn", str(path)).splitlines():
        if function := _FUNCTION.match(line):
            name = function[1]
            wanted = not (_RUNTIME.match(name) or name.startswith("std::"))
            wanted = wanted and not (other_than and re.search(other_than, name)) and bool(re.search(only, name))
        elif line.startswith("Disassembly of section"):
            wanted = False
        if wanted and line.strip():
            kept.append(line.rstrip())
    text = "\n".join(kept) + "\n"
    return Stage(stage="assembly", language="asm", text=text, part=part, target="cpu", counts=count_assembly(text))


def count_assembler(text: str) -> dict[str, int]:
    """`count_assembly` for assembler source, where instructions follow a tab and directives start with a dot."""
    return count_assembly(re.sub(r"^\t(?=[a-z])", "0:\t", text, flags=re.MULTILINE))


def count_assembly(text: str) -> dict[str, int]:
    """Instructions of an objdump listing: all, calls, fused multiply-adds, and vector instructions by register
    width."""
    counts: Counter[str] = Counter(instructions=0, fma=0, calls=0)
    for line in text.splitlines():
        if not (match := _INSTRUCTION.match(line)):
            continue
        name, operands = match.groups()
        counts["instructions"] += 1
        counts["fma"] += bool(re.match(r"vf(n?m(add|sub)|maddsub|msubadd)|fml[as]|fn?m(add|sub)", name))
        counts["calls"] += name in ("call", "callq", "bl")
        for bits, registers in ((512, r"%zmm"), (256, r"%ymm"), (128, r"%xmm|\bv\d+\.(16b|8h|4s|2d)")):
            if re.search(registers, operands):
                counts[f"vector_{bits}"] += 1
                break
    return dict(counts)
