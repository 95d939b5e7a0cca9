"""Extracts the source line of each line of a stage from the debug information that compilers emit.

Every function takes a text and returns it without debug information, for reading, plus {line of the result, from 1:
"file:line"}. For inlined code this is the innermost location outside the compiler's own files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from .stage import foreign, short

Lines = dict[int, str]
Place = tuple[str, int]


def _chosen(chain: Sequence[Place]) -> str | None:
    """The location to show from an inlining chain, innermost first."""
    own = [place for place in chain if not foreign(short(place[0]))] or chain
    return f"{short(own[0][0])}:{own[0][1]}" if own and own[0][1] > 0 else None


def collected(found: Iterable[tuple[int, Sequence[Place]]]) -> Lines:
    """Map lines to the location to show from their inlining chains."""
    return {line: place for line, chain in found if (place := _chosen(chain)) is not None}


def mlir(text: str) -> tuple[str, Lines]:
    """MLIR without its locations, and those: `loc(#loc3)` ends a line, `#loc3 = loc(…)` defines it."""
    texts = text.splitlines()
    aliases = {m[1]: m[2] for line in texts if (m := re.match(r"(#loc\d*) = loc\((.*)\)$", line.strip()))}

    def chain(content: str, depth: int = 0) -> list[Place]:
        content = content.strip()
        if depth > 50:
            return []
        if content in aliases:
            return chain(aliases[content], depth + 1)
        if place := re.match(r'"([^"]+)":(\d+)(?::\d+)?', content):
            return [(place[1], int(place[2]))]
        if site := re.match(r"callsite\((\S+) at (\S+)\)$", content):
            return chain(site[1], depth + 1) + chain(site[2], depth + 1)
        if fused := re.match(r"fused(?:<.*>)?\[([^,\]]+)", content):
            return chain(fused[1], depth + 1)
        if named := re.match(r'"[^"]*"\((.*)\)$', content):
            return chain(named[1], depth + 1)
        return []

    kept: list[str] = []
    found = []
    for line in texts:
        if line.lstrip().startswith("#loc"):
            continue
        at = re.search(r'\bloc\((#loc\d*|"[^"]+":\d+:\d+)\)\s*(\{?)$', line)
        kept.append(re.sub(r'\s*\bloc\((#loc\d*|unknown|"[^"]*"(?:\(#loc\d*\)|:\d+:\d+)?)\)', "", line))
        if at and kept[-1].strip() not in ("}", "} else {"):
            found.append((len(kept), chain(at[1])))
    return "\n".join(kept) + "\n", collected(found)


def llvm(text: str) -> tuple[str, Lines]:
    """LLVM IR without its debug information, and the locations: `!dbg !12` refers to a `!DILocation` with scope, file
    and inlinedAt."""
    nodes = {
        m[1]: m[2] for line in text.splitlines() if (m := re.match(r"(!\d+) = (?:distinct )?!(DI\w+\(.*\))", line))
    }

    def field(node: str, name: str) -> str:
        match = re.search(rf'\b{name}: ("[^"]*"|[^,)]+)', node)
        return match[1].strip('"') if match else ""

    def file_of(reference: str) -> str:
        node = nodes.get(reference, "")
        if node.startswith("DIFile"):
            return os.path.join(field(node, "directory"), field(node, "filename"))
        outer = field(node, "file") or field(node, "scope")
        return file_of(outer) if outer else ""

    def chain(reference: str) -> list[Place]:
        places: list[Place] = []
        while reference in nodes and len(places) < 50:
            node = nodes[reference]
            places.append((file_of(field(node, "scope")), int(field(node, "line") or 0)))
            reference = field(node, "inlinedAt")
        return places

    kept: list[str] = []
    found = []
    for line in text.splitlines():
        if line.startswith("!") and re.match(r"!\d+ = (distinct )?!DI", line):
            continue
        at = re.search(r",? !dbg (!\d+)", line)
        kept.append(line if at is None else line.replace(at[0], ""))
        if at:
            found.append((len(kept), chain(at[1])))
    return "\n".join(kept).rstrip() + "\n", collected(found)


def ptx(text: str) -> tuple[str, Lines]:
    """PTX without its debug information, and the locations: `.loc file line column` holds until the next, `.file` names
    files."""
    files: dict[str, str] = {}
    for match in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', text, re.MULTILINE):
        files[match[1]] = os.path.join(match[2], match[3]) if match[3] else match[2]
    kept: list[str] = []
    found = []
    here: list[Place] = []
    for line in text.splitlines():
        if re.match(r"\s*\.(section|file)\s", line):
            here = []
            if ".section" in line:  # debug sections follow the code
                break
        elif at := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at (\d+) (\d+))?", line):
            here = [(files.get(at[1], "?"), int(at[2]))]
            if at[3]:
                here.append((files.get(at[3], "?"), int(at[4])))
        elif not re.match(r"\$L__(tmp|func)\w*:", line):
            kept.append(line.rstrip())
            if line.startswith("}"):
                here = []
            if here and line.strip() and not line.lstrip().startswith((".", "//")):
                found.append((len(kept), here))
    return "\n".join(kept).rstrip() + "\n", collected(found)


def sass(listing: str, function: str = "") -> tuple[str, Lines]:
    """The output of `nvdisasm -c -gi` without its line comments, and those as locations; only of `function` if
    given."""
    kept: list[str] = []
    found: list[tuple[int, Sequence[Place]]] = []
    here: list[Place] = []
    fresh = True
    inside = False
    for line in listing.splitlines():
        if ".section" in line and (section := re.match(r"\s*\.section\s+([^,\s]+)", line)):
            inside = section[1] == f".text.{function}" if function else section[1].startswith(".text.")
            here = []
        elif not inside:  # most lines, if a library has many functions
            continue
        elif at := re.match(r'\s*//## File "([^"]*)", line (\d+)', line):
            here = [*([] if fresh else here), (at[1], int(at[2]))]
            fresh = False
        elif re.match(r"\s*(/\*[0-9a-f]{4,}\*/|[.\w$]+:)", line):
            kept.append(line.rstrip())
            fresh = True
            if here and "/*" in line:
                found.append((len(kept), here))
    return "\n".join(kept) + "\n", collected(found)
