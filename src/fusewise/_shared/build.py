"""Native code: compiled on first use with the user's compiler, stored in the user's cache folder (`cache.py`), and loaded.

    library = build.library("rope", [folder / "rope.cpp"], build.cxx(), build.NATIVE_FLAGS)   -> ctypes.CDLL

A cache entry is named by a hash of everything it depends on: source text, compiler and version, flags, the environment
variables that compilers read, platform, and for native code the features of this CPU, since different machines may
share a home directory. It is a folder with the library and its SHA-256, completed under a temporary name and then
renamed, so that a killed process leaves no partial entry; a library that does not match its digest is rebuilt. If
several processes need the same entry, one builds it and the others wait. Without a compiler, as in an image that runs
what another has built, the entry last used for the same sources and flags is loaded.

Loading a library executes it, so one that others could have written is refused. A failed build is cached for the
lifetime of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import cache

TIMEOUT_S = 600
ERROR_LINES = 12

#: C++ flags for this CPU only. Arithmetic stays IEEE (no reassociation, no flush to zero, infinities and NaN
#: preserved), but fma contraction is allowed, and errno and floating-point exception flags are not maintained.
NATIVE_FLAGS: tuple[str, ...] = (
    "-std=c++17", "-O3", "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread",
)  # fmt: skip

#: Environment variables from which gcc, clang and nvcc read flags, programs, and header and library paths.
READ_BY_COMPILERS = (
    "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "LD_RUN_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX",
    "CCC_OVERRIDE_OPTIONS", "SDKROOT", "MACOSX_DEPLOYMENT_TARGET",
    "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN",
)  # fmt: skip


class BuildError(RuntimeError):
    """Native code cannot be built or loaded; the message says why and how to fix it."""


@dataclass(frozen=True)
class Compiler:
    """A compiler command that builds a shared library (`command flags sources -o library`), or why there is none."""

    command: tuple[str, ...]
    version: str
    missing: str = ""

    def needed(self) -> tuple[str, ...]:
        """The command.

        Raises:
            BuildError: there is no compiler.
        """
        if self.missing:
            raise BuildError(self.missing)
        return self.command


@functools.cache
def compiler(variable: str, *names: str) -> Compiler:
    """The compiler given by the environment variable (shell words), or the first of `names` on the PATH."""
    try:
        return _found(variable, *names)
    except BuildError as error:
        return Compiler((), "", str(error))


def _found(variable: str, *names: str) -> Compiler:
    try:
        chosen = shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise BuildError(f"{variable}={os.environ[variable]} is no command: {error}; set {variable}") from None
    for words in [chosen] if chosen else [[name] for name in names]:
        path = shutil.which(words[0])
        if path is None:
            continue
        command = (os.path.abspath(path), *words[1:])
        try:
            result = _run([*command, "--version"], 60)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"the compiler {shlex.join(command)} does not run: {error}; set {variable}") from error
        if result.returncode != 0:
            raise BuildError(
                f"the compiler {shlex.join(command)} does not run:\n{_tail(result.stderr)}\nset {variable}"
            )
        return Compiler(command, result.stdout)
    wanted = f"{variable}={chosen[0]}" if chosen else ", ".join(names)
    raise BuildError(f"no compiler found on the PATH ({wanted}); install one or set {variable}")


def cxx() -> Compiler:
    """The user's C++ compiler."""
    return compiler("CXX", "c++", "g++", "clang++")


def nvcc() -> Compiler:
    """The user's CUDA compiler; compiles several sources, and one for several GPUs, in parallel.

    Within a source it does not: with nvcc 13's `-split-compile`, the same source spilled registers in some builds and not in others.
    """
    found = compiler("NVCC", "nvcc")
    return found if found.missing else replace(found, command=(*found.command, "--threads=0"))


#: The arguments of the functions below: name, sources, compiler and flags of a library.
Recipe = tuple[str, Sequence[Path], Compiler, Sequence[str]]

_LOADED: dict[str, ctypes.CDLL | BuildError] = {}
_BUILT: list[Path] = []
_LOCK = threading.Lock()
#: Whether this process was forked, with this module loaded, from one with several threads: other threads, such as those
#: of an OpenMP runtime, are gone, along with whatever they held.
FORKED = False
_SEVERAL = True  # whether this process has several threads when it forks; unknown except on Linux


def _forking() -> None:
    global _SEVERAL
    try:
        _SEVERAL = len(os.listdir("/proc/self/task")) > 1
    except OSError:
        _SEVERAL = True


def _forked() -> None:
    global _LOCK, FORKED
    _LOCK, FORKED = threading.Lock(), FORKED or _SEVERAL


os.register_at_fork(before=_forking, after_in_child=_forked)


def library(name: str, sources: Sequence[Path], compiler: Compiler, flags: Sequence[str]) -> ctypes.CDLL:
    """The shared library of `sources` (headers are part of the key, not of the command), built if necessary.

    Raises:
        BuildError: the cache folder is not safe, or the compiler fails; also on every later call in this process.
    """
    with _as_build_error(name):
        key = _key(sources, compiler, flags)
    with _LOCK:
        if key not in _LOADED:
            try:
                with _as_build_error(name):
                    _LOADED[key] = ctypes.CDLL(str(_entry(name, key, sources, compiler, flags)))
            except BuildError as error:
                _LOADED[key] = error
        loaded = _LOADED[key]
    if isinstance(loaded, BuildError):
        raise BuildError(*loaded.args)
    return loaded


def prepared(name: str, sources: Sequence[Path], compiler: Compiler, flags: Sequence[str]) -> Path:
    """The file that `library` with the same arguments loads, built if necessary but not loaded.

    Raises:
        BuildError: as `library`.
    """
    with _as_build_error(name):
        return _entry(name, _key(sources, compiler, flags), sources, compiler, flags)


def built(name: str, sources: Sequence[Path], compiler: Compiler, flags: Sequence[str]) -> bool:
    """Whether the entry for `library` with the same arguments exists; builds and loads nothing.

    Raises:
        BuildError: as `library`, if what is there is not safe.
    """
    with _as_build_error(name):
        if compiler.missing:
            return _left(name, sources, flags) is not None
        entry = cache.folder("native") / f"{name}-{_key(sources, compiler, flags)}"
        if not entry.exists():
            return False
        cache.check_folder(entry.parent)
        return _intact(entry)


def ahead(first: Recipe, then: Callable[[], Recipe]) -> None:
    """If `first` still has to be built, build the recipe returned by `then`, which is needed after it, in the
    background. Loading that library waits for the build and reports its errors.

    Raises:
        BuildError: as `built`.
    """

    def make() -> None:
        with contextlib.suppress(BuildError):
            prepared(*then())

    if not first[2].missing and not built(*first):
        threading.Thread(target=make, name="fusewise-build", daemon=True).start()


def why_not(recipe: Recipe, otherwise: str = "it is not built; run `fusewise build`") -> str:
    """Why a library is missing: there is no compiler, or it has not been built."""
    return recipe[2].missing or otherwise


def loaded() -> list[Path]:
    """The files of the libraries that this process has loaded."""
    return [Path(library._name) for library in _LOADED.values() if isinstance(library, ctypes.CDLL)]


def loads() -> int:
    """Count of libraries that this process has built, loaded, or failed to load. While it is unchanged, so are the
    libraries that can be loaded."""
    return len(_LOADED) + len(_BUILT)


@contextlib.contextmanager
def _as_build_error(name: str) -> Iterator[None]:
    """Context that turns errors of files or the cache folder into a BuildError."""
    try:
        yield
    except cache.Refused as error:
        raise BuildError(str(error)) from None
    except OSError as error:
        raise BuildError(
            f"the library of {name} cannot be made, kept or loaded: {error}; set FUSEWISE_CACHE_DIR"
        ) from error


def _key(sources: Sequence[Path], compiler: Compiler | None, flags: Sequence[str]) -> str:
    """Hash of everything a library depends on; without a compiler, of everything except the compiler."""
    read = [(name, os.environ[name]) for name in READ_BY_COMPILERS if compiler is not None and name in os.environ]
    parts = [
        repr([(source.name, source.read_bytes()) for source in sources]), repr(compiler), repr(tuple(flags)), sys.platform, platform.machine(),
        repr(platform.libc_ver()), _cpu_features() if any(flag.endswith("=native") for flag in flags) else "", repr(read),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _last(name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """The file with the name of the entry last used for these sources and flags, with any compiler."""
    return cache.folder("native") / f"{name}-{_key(sources, None, flags)}.last"


def _left(name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path | None:
    """That entry, if it exists and is intact."""
    last = _last(name, sources, flags)
    try:
        cache.check_folder(last.parent)
        cache.check_private(last, last.lstat())
        named = last.read_text(errors="replace")  # damage is no name
    except FileNotFoundError:
        return None
    entry = last.parent / named
    return entry if re.fullmatch(re.escape(name) + "-[0-9a-f]{32}", named) and _intact(entry) else None


def _remember(name: str, entry: Path, sources: Sequence[Path], flags: Sequence[str]) -> None:
    last = _last(name, sources, flags)
    # Failure is not an error (the folder may be read-only or full): this only matters without a compiler.
    with contextlib.suppress(OSError):
        if last.is_file() and last.read_text(errors="replace") == entry.name:
            return
        descriptor, work = tempfile.mkstemp(prefix=f"{last.name}.", suffix=".tmp", dir=last.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(entry.name)
            os.replace(work, last)
        except OSError:
            os.unlink(work)
            raise


@functools.cache
def _cpu_features() -> str:
    """The CPU properties on which code for `=native` depends."""
    if sys.platform == "darwin":
        names = ["machdep.cpu.brand_string", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
        return _run(["/usr/sbin/sysctl", "-i", *names], 60).stdout
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    words = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in words)


def _entry(name: str, key: str, sources: Sequence[Path], compiler: Compiler, flags: Sequence[str]) -> Path:
    """The verified library of an entry, built or rebuilt if necessary."""
    folder = cache.folder("native")
    if compiler.missing:
        left = _left(name, sources, flags)
        if left is None:
            raise BuildError(compiler.missing)
        return left / "library.so"
    cache.make_private(folder)
    entry = folder / f"{name}-{key}"
    path = entry / "library.so"
    if _intact(entry):
        _remember(name, entry, sources, flags)
        return path
    with cache.locked(folder / f"{name}-{key}.lock") as alone:
        if not _intact(entry):
            for left in folder.glob(f"{name}-{key}.*.tmp") if alone else ():  # left by killed builds
                shutil.rmtree(left, ignore_errors=True)
            _build(name, entry, sources, compiler, flags)
    if not _intact(entry):
        raise BuildError(
            f"the library of {name} in {entry} changed while it was built; set FUSEWISE_CACHE_DIR elsewhere"
        )
    _remember(name, entry, sources, flags)
    return path


def _build(name: str, entry: Path, sources: Sequence[Path], compiler: Compiler, flags: Sequence[str]) -> None:
    work, trash = (Path(tempfile.mkdtemp(prefix=f"{entry.name}.", suffix=".tmp", dir=entry.parent)) for _ in range(2))
    try:
        path = work / "library.so"
        inputs = [os.path.abspath(source) for source in sources if source.suffix not in (".h", ".hpp", ".cuh")]
        # A relative output path: nvcc passes paths to a shell, which would expand a $ in the path of the cache folder.
        rewritten = [path for path in inputs if set(path) & set('$`"\\')]
        if rewritten and Path(compiler.command[0]).name.startswith("nvcc"):
            raise BuildError(
                f"building {name} failed: nvcc's shell would not take {rewritten[0]} as it is; install it elsewhere"
            )
        command = [*compiler.command, *flags, *inputs, "-o", path.name]
        try:
            result = _run(command, TIMEOUT_S, work)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"building {name} failed: {error}") from error
        if result.returncode != 0 or not path.is_file():
            output = _tail(result.stderr or result.stdout)
            raise BuildError(
                f"building {name} failed: {shlex.join(command)} exited with {result.returncode}:\n{output}"
            )
        path.chmod(0o700)  # independent of the umask
        _sync(path)
        digest = work / "sha256"
        digest.write_text(_digest(path))
        digest.chmod(0o600)
        _sync(digest)
        try:
            os.replace(work, entry)  # which cannot replace a folder that is not empty
        except OSError:
            if not entry.exists():
                raise
            # One that another process has built meanwhile, without locks, may be in use already: it stays.
            if not _intact(entry):
                os.replace(entry, trash)
                os.replace(work, entry)
        _sync(entry.parent)
        _BUILT.append(entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(trash, ignore_errors=True)


def _intact(entry: Path) -> bool:
    """Whether an entry exists and is intact. One that others could have written is refused, not replaced."""
    path, digest = entry / "library.so", entry / "sha256"
    try:
        for part in (entry, path, digest):
            cache.check_private(part, part.lstat())
        return digest.read_bytes() == _digest(path).encode()
    except FileNotFoundError:
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _run(command: Sequence[str], timeout: float, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout,
        env=environment, cwd=folder,
    )  # fmt: skip


def _tail(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-ERROR_LINES:])
