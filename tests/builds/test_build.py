"""The cache of native code: damaged entries are rebuilt, failures give a reason, parallel builds do not collide."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from fusewise._shared import build, host
from fusewise._shared.cache import locked

from .support import FLAGS, SOURCE, entries, forget, make

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on the PATH")


def test_built_once_and_kept_privately(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.cxx(), build._cpu_features()
    umask, opened = os.umask(0), set(os.listdir("/proc/self/fd"))
    try:
        assert make(source) == 42
    finally:
        os.umask(umask)
    assert set(os.listdir("/proc/self/fd")) <= opened
    (entry,) = entries(cache)
    for path in (cache.parent, cache, entry, *entry.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    forget()
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
    assert make(source) == 42


def test_whatever_it_depends_on_makes_another_entry(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(source)
    make(source, (*FLAGS, "-DX"))
    make(source, (*FLAGS, "-march=native"))
    assert {"flags", "Features"} & {line.partition(":")[0].strip() for line in build._cpu_features().splitlines()}
    monkeypatch.setattr(build, "_cpu_features", lambda: "another CPU")
    make(source, (*FLAGS, "-march=native"))
    make(source)  # portable code, so the existing entry serves this CPU too
    build.library("answer", [source], build.Compiler(build.cxx().command, "another version"), FLAGS)
    assert len(entries(cache)) == 5
    source.write_text(SOURCE % 43)
    assert make(source) == 43
    assert len(entries(cache)) == 6


def test_native_code_is_for_this_cpu() -> None:
    shown = [*build.cxx().needed(), *build.NATIVE_FLAGS, "-dM", "-E", "-x", "c++", os.devnull]
    defined = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    assert ("__AVX2__" in defined) == ("avx2" in build._cpu_features().split())


@pytest.mark.parametrize("variable", ["CPATH", "NVCC_APPEND_FLAGS"])
def test_what_a_compiler_reads_from_the_environment_makes_another_entry(
    cache: Path, source: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    make(source)
    monkeypatch.setenv(variable, str(source.parent))
    make(source)
    monkeypatch.delenv(variable)
    make(source)
    assert len(entries(cache)) == 2


@pytest.mark.parametrize("damage", ["truncated", "changed", "no library", "no digest", "no text for a digest"])
def test_a_damaged_entry_is_built_again(cache: Path, source: Path, damage: str) -> None:
    make(source)
    (entry,) = entries(cache)
    path, digest = entry / "library.so", entry / "sha256"
    content = path.read_bytes()
    path.unlink()  # not overwritten in place: this process has the old one mapped
    if damage == "truncated":
        path.write_bytes(content[:1000])
    elif damage == "changed":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "no digest":
        path.write_bytes(content)
        digest.unlink()
    elif damage == "no text for a digest":
        path.write_bytes(content)
        digest.write_bytes(b"\xff\x00")
    if path.exists():
        path.chmod(0o700)
    forget()
    assert make(source) == 42
    assert entries(cache) == [entry] and path.read_bytes() == content and digest.exists()


def test_a_failed_build_says_what_the_compiler_said_and_is_not_tried_again(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text("#error no such luck\n")
    with pytest.raises(build.BuildError, match=r"exited with 1(.|\n)*no such luck"):
        make(source)
    assert entries(cache) == []
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("tried again"))
    with pytest.raises(build.BuildError, match="no such luck"):
        make(source)


def test_the_compiler_is_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "mine"
    fake.write_text('#!/bin/sh\necho "mine $@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", f"{fake} --fast")
    build.compiler.cache_clear()
    try:
        assert build.cxx() == build.Compiler((str(fake), "--fast"), "mine --fast --version\n")
        fake.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
        build.compiler.cache_clear()
        with pytest.raises(build.BuildError, match=r"does not run(.|\n)*broken"):
            build.cxx().needed()
        monkeypatch.setenv("CXX", "no-such-compiler")
        build.compiler.cache_clear()
        with pytest.raises(build.BuildError, match="CXX=no-such-compiler"):
            build.cxx().needed()
        monkeypatch.setenv("CXX", "g++ 'half")
        build.compiler.cache_clear()
        with pytest.raises(build.BuildError, match="CXX=g\\+\\+ 'half is no command: No closing quotation; set CXX"):
            build.cxx().needed()
    finally:
        build.compiler.cache_clear()


def test_without_a_compiler_what_was_built_serves(cache: Path, source: Path) -> None:
    """As in an image that runs what another one built: only for the same sources and flags, and not if others could
    have written it.
    """
    nothing = build.Compiler((), "", "no compiler found")
    arguments = "answer", [source], nothing, FLAGS
    assert not build.built(*arguments)
    with pytest.raises(build.BuildError, match="no compiler found"):
        build.library(*arguments)
    make(source)
    forget()
    assert build.built(*arguments) and build.library(*arguments).answer() == 42
    (entry,) = entries(cache)
    assert build.prepared(*arguments) == entry / "library.so"

    other = source.with_name("other.cpp")
    other.write_text(SOURCE % 43)
    for unlike in (("answer", [other], nothing, FLAGS), ("answer", [source], nothing, (*FLAGS, "-DX"))):
        with pytest.raises(build.BuildError, match="no compiler found"):
            build.prepared(*unlike)

    newer = build.Compiler(build.cxx().command, "another version")
    last = build.prepared("answer", [source], newer, FLAGS)
    assert build.prepared(*arguments) == last != entry / "library.so"
    (named,) = cache.glob("answer-*.last")
    named.chmod(0o666)
    with pytest.raises(build.BuildError, match=r"answer-.*last"):
        build.prepared(*arguments)
    named.chmod(0o600)
    for text in (f"../native/{entry.name}", "answer-", "", entry.name + "\0", "\udcff"):
        named.write_text(text, errors="surrogateescape")
        assert not build.built(*arguments)
    forget()
    assert make(source) == 42 and named.read_text() == entry.name
    (entry / "library.so").write_bytes(b"damaged")
    assert not build.built(*arguments)


def test_a_shell_makes_nothing_of_the_folders_name(
    tmp_path: Path, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc runs its steps through a shell."""
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", str(tmp_path / 'a b\'s "c" $HOME `touch x`'))
    shell = tmp_path / "by-shell"
    shell.write_text(f"#!/bin/sh\neval {shutil.which('c++')} $*\n")
    shell.chmod(0o755)
    assert build.library("answer", [source], build.Compiler((str(shell),), ""), FLAGS).answer() == 42


def test_a_compiler_by_a_relative_path(
    tmp_path: Path, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").symlink_to(shutil.which("c++") or "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./mine")
    build.compiler.cache_clear()
    try:
        assert make(source) == 42
    finally:
        build.compiler.cache_clear()


def run(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, env={**os.environ, "FUSEWISE_CACHE_DIR": str(cache.parent), **environment},
    )  # fmt: skip


BUILD = """
    from pathlib import Path
    from fusewise._shared import build
    print(build.library("answer", [Path({source!r})], build.cxx(), {flags!r}).answer())
"""


@pytest.fixture
def slow_compiler(tmp_path: Path) -> Path:
    """A compiler that logs each build and pauses with half of its output written."""
    path = tmp_path / "slow"
    real = shutil.which("c++")
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\n'
        f'echo build >> {tmp_path}/builds\nfor last; do :; done\necho half > "$last"\nsleep 1\nexec {real} "$@"\n'
    )
    path.chmod(0o755)
    return path


def test_processes_that_want_it_at_once_build_it_once(
    cache: Path, source: Path, slow_compiler: Path, tmp_path: Path
) -> None:
    code = BUILD.format(source=str(source), flags=FLAGS)
    children = [run(code, cache, CXX=str(slow_compiler)) for _ in range(3)]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [out for out, _ in outputs] == ["42\n"] * 3, outputs
    assert (tmp_path / "builds").read_text() == "build\n"


def test_a_build_killed_in_the_middle_leaves_nothing_that_is_used(
    cache: Path, source: Path, slow_compiler: Path, tmp_path: Path
) -> None:
    code = BUILD.format(source=str(source), flags=FLAGS)
    child = run(code, cache, CXX=str(slow_compiler))
    deadline = time.monotonic() + 60
    while not list(cache.glob("*.tmp/library.so")):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    assert list(cache.glob("*.tmp/library.so")), "killed too late to test anything"
    out, error = run(code, cache, CXX=str(slow_compiler)).communicate(timeout=120)
    assert out == "42\n", error
    assert (tmp_path / "builds").read_text() == "build\nbuild\n"
    assert not list(cache.glob("*.tmp")), "what the killed build left is cleared"


def test_where_files_cannot_be_locked_what_another_process_built_meanwhile_stays(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may already be in use there."""

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    run, made = build._run, []

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(build, "_run", run)
        made.append(build.prepared("answer", [source], cxx, FLAGS).parent.stat().st_ino)
        return run(*arguments)

    cxx = build.cxx()
    monkeypatch.setattr(build, "_run", overtaken)
    assert make(source) == 42
    assert [entry.stat().st_ino for entry in entries(cache)] == made


def test_a_compiler_does_not_read_the_programs_input(cache: Path, source: Path, tmp_path: Path) -> None:
    reader = tmp_path / "reader"
    reader.write_text(f'#!/bin/sh\ncat\nexec {shutil.which("c++")} "$@"\n')
    reader.chmod(0o755)
    child = run(BUILD.format(source=str(source), flags=FLAGS) + "    print(input())", cache, CXX=str(reader))
    out, error = child.communicate("mine\n", timeout=120)
    assert out == "42\nmine\n", error


def test_without_a_compiler_rope_runs_on_the_reference_and_can_say_why(cache: Path, tmp_path: Path) -> None:
    code = """
        import torch, fusewise
        from fusewise.ops.rope import _op
        x, f = torch.randn(1, 4, 2, 8), torch.ones(4)
        assert _op.choose("cpu", torch.float32) == "reference"
        assert fusewise.rope(x, inv_freq=f).equal(fusewise.rope(x, inv_freq=f, impl="reference"))
        try:
            fusewise.rope(x, inv_freq=f, impl="cpu")
        except ValueError as error:
            print(error)
    """
    (tmp_path / "empty").mkdir()
    child = run(code, cache, PATH=str(tmp_path / "empty"), CXX="")
    out, error = child.communicate(timeout=120)
    assert child.returncode == 0, error
    assert "no compiler found on the PATH (c++, g++, clang++); install one or set CXX" in out
    missing = build.Compiler((), "", "no compiler")
    assert build.why_not(("answer", [], missing, FLAGS)) == "no compiler"


@pytest.mark.skipif(sys.platform != "linux", reason="the extensions are made for Linux")
def test_an_extension_shares_the_standard_library_that_torch_has(cache: Path, tmp_path: Path) -> None:
    """Also if the compiler is configured to link its own statically: two copies in one process share symbols, which
    breaks streams.
    """
    source = tmp_path / "digits.cpp"
    source.write_text(
        "#include <sstream>\n"
        'extern "C" __attribute__((visibility("default"))) unsigned long digits(long n) {\n'
        "  std::ostringstream text;\n  text << n;\n  return text.str().size();\n}\n"
    )
    cxx = build.cxx()
    with_its_own = build.Compiler((*cxx.command, "-static-libstdc++"), cxx.version)
    assert build.library("digits", [source], with_its_own, host.flags()).digits(12345) == 5


@pytest.mark.skipif(sys.platform != "linux", reason="extensions are for Linux")
def test_an_extension_is_found_beside_a_mapped_file_whose_name_is_no_text(tmp_path: Path) -> None:
    expected = host.flags()
    path = os.fsencode(tmp_path) + b"/weights of M\xe9"
    with open(path, "wb+") as file:
        file.write(bytes(8))
        file.flush()
        with mmap.mmap(file.fileno(), 8):
            assert host.flags() == expected


def test_a_lock_ends_with_its_block_though_a_child_was_forked_in_it(tmp_path: Path) -> None:
    path = tmp_path / "name.lock"
    with locked(path):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_child_forked_while_another_thread_builds_goes_on() -> None:
    with build._LOCK:
        child = os.fork()
        if child == 0:
            os._exit(0 if build._LOCK.acquire(timeout=5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_only_of_several_threads_a_forked_child_has_lost_some() -> None:
    code = """
import os, threading
from fusewise._shared import build

def told_a_child():
    child = os.fork()
    if child == 0:
        os._exit(build.FORKED)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

assert told_a_child() == 0
threading.Thread(target=threading.Event().wait, daemon=True).start()
assert told_a_child() == 1
assert not build.FORKED
"""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # otherwise numpy, loaded by torch, starts threads
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60, env=environment)


def test_nvcc_is_not_given_sources_that_its_shell_would_rewrite(tmp_path: Path, source: Path, cache: Path) -> None:
    other = source
    source = tmp_path / "a$(touch made)" / "answer.cpp"
    source.parent.mkdir()
    source.write_text(SOURCE % 42)
    with pytest.raises(
        build.BuildError, match=r"nvcc's shell would not take .*made\)/answer.cpp as it is; install it elsewhere"
    ):
        build.library("answer", [other, source], build.Compiler(("/bin/nvcc",), "13"), FLAGS)
