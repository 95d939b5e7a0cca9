"""Folders of native code: none is used into which others could put a library, and errors give the reason."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fusewise._shared import build
from fusewise._shared.cache import Refused, _unmapped, folder

from .support import entries, forget, make

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on the PATH")


@pytest.mark.parametrize("which", ["root", "folder", "entry", "library"])
@pytest.mark.parametrize("mode", [0o020, 0o002], ids=["group", "others"])
def test_what_others_may_write_to_is_refused(cache: Path, source: Path, which: str, mode: int) -> None:
    make(source)
    (entry,) = entries(cache)
    path = {"root": cache.parent, "folder": cache, "entry": entry, "library": entry / "library.so"}[which]
    path.chmod(0o755)
    forget()
    assert make(source) == 42
    path.chmod(0o700 | mode)
    forget()
    with pytest.raises(build.BuildError, match="writable by others"):
        make(source)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
@pytest.mark.parametrize("which", ["folder", "library"])
def test_what_belongs_to_another_user_is_refused(cache: Path, source: Path, which: str) -> None:
    make(source)
    os.chown(cache if which == "folder" else entries(cache)[0] / "library.so", 12345, -1)
    forget()
    with pytest.raises(build.BuildError, match="belongs to user 12345"):
        make(source)


def test_symbolic_links_inside_are_refused(cache: Path, source: Path, tmp_path: Path) -> None:
    make(source)
    (entry,) = entries(cache)
    shutil.move(entry, tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    forget()
    with pytest.raises(build.BuildError, match="symbolic link"):
        make(source)


def test_a_folder_in_one_that_everybody_may_rewrite_is_refused(tmp_path: Path, source: Path, cache: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(build.BuildError, match="writable by others"):
        make(source)
    tmp_path.chmod(0o1777)  # like /tmp: only the owner may rename
    forget()
    assert make(source) == 42


@pytest.mark.parametrize("chain", [False, True], ids=["link", "link to a link"])
def test_a_link_that_others_can_replace_is_refused(
    chain: bool, tmp_path: Path, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lead elsewhere between the check and the use of a library."""
    make(source)
    shared = tmp_path / "shared"
    shared.mkdir()
    link = shared / "link"
    link.symlink_to(cache.parent)
    chosen = tmp_path / "mine" if chain else link
    if chain:
        chosen.symlink_to(Path("shared") / "link")
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", str(chosen))
    forget()
    assert make(source) == 42
    shared.chmod(0o777)
    forget()
    with pytest.raises(build.BuildError, match=r"shared, which holds .* writable by others"):
        make(source)
    shared.chmod(0o1777)  # like /tmp: its owner may replace the link
    forget()
    assert make(source) == 42
    if os.getuid() == 0:
        os.chown(link, 54321, -1, follow_symlinks=False)
        forget()
        with pytest.raises(build.BuildError, match=r"link, which holds .* belongs to user 54321"):
            make(source)


def test_a_cache_folder_that_cannot_be_made_is_an_error(
    monkeypatch: pytest.MonkeyPatch, source: Path, cache: Path
) -> None:
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", "/proc/fusewise")
    with pytest.raises(build.BuildError, match=r"cannot be used.*FUSEWISE_CACHE_DIR"):
        make(source)


def test_a_library_that_cannot_be_loaded_is_named_with_the_one_fix(
    monkeypatch: pytest.MonkeyPatch, source: Path, cache: Path
) -> None:
    """As on a file system that forbids execution."""

    def refused(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr("ctypes.CDLL", refused)
    with pytest.raises(build.BuildError, match=r"library\.so: failed to map.*; set FUSEWISE_CACHE_DIR$"):
        make(source)


def test_a_user_without_a_home_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, source: Path, cache: Path, tmp_path: Path
) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("HOME", "FUSEWISE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(build.BuildError, match=r"no cache folder.*FUSEWISE_CACHE_DIR"):
        make(source)
    with pytest.raises(Refused, match=r"no cache folder.*FUSEWISE_CACHE_DIR"):
        folder("limits")
    forget()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert make(source) == 42


@pytest.mark.parametrize(
    ("caches", "used"), [("", ".cache"), ("caches", ".cache"), ("./c", ".cache"), ("~/c", "c"), ("{home}/xdg", "xdg")]
)
def test_a_folder_of_caches_that_is_relative_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caches: str, used: str
) -> None:
    """As the XDG specification demands: it would be another one in every working directory."""
    monkeypatch.delenv("FUSEWISE_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", caches.format(home=tmp_path))
    assert folder("limits") == tmp_path / used / "fusewise" / "limits"


def test_without_a_compiler_a_folder_that_others_may_write_to_is_refused(
    tmp_path: Path, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(source)
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    forget()
    assert make(source) == 42
    for part in (cache, cache.parent, tmp_path):
        mode = part.stat().st_mode
        part.chmod(0o777)
        forget()
        with pytest.raises(build.BuildError, match="writable by others"):
            make(source)
        part.chmod(mode)
    forget()
    assert make(source) == 42


def test_an_ancestor_of_another_user_or_group_is_refused(
    tmp_path: Path, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root gives folders away")
    for user, group, mode, words in (
        (54321, 0, 0o755, "belongs to user 54321"),
        (0, 54321, 0o757, "writable by others"),
        (0, 54321, 0o775, "writable by others"),
    ):
        os.chown(tmp_path, user, group)
        tmp_path.chmod(mode)
        forget()
        with pytest.raises(build.BuildError, match=words):
            make(source)
    os.chown(tmp_path, 0, 0)
    forget()
    assert make(source) == 42  # writable by the user's own group


@pytest.mark.parametrize(
    ("users", "user", "unmapped"),
    [("0 0 4294967295", 65534, False), ("0 1000 1", 65534, True), ("0 1000 1", 1000, False)],
)
def test_only_in_a_user_namespace_a_user_stands_for_those_outside(
    users: str, user: int, unmapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"/proc/self/uid_map": f"         {users}\n", "/proc/sys/kernel/overflowuid": "65534\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    assert _unmapped(user) == unmapped


def test_folders_that_are_made_are_the_users_alone_whatever_the_umask(
    tmp_path: Path, cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", str(tmp_path / "a" / "b" / "c"))
    before = os.umask(0)
    try:
        forget()
        assert make(source) == 42
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c", "a/b/c/native")} == {0o700}


@pytest.mark.parametrize(("module", "name"), [(tempfile, "mkstemp"), (os, "replace")])
def test_a_folder_that_cannot_be_written_to_serves(
    module: Any, name: str, cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(source)
    forget()
    (named,) = cache.glob("answer-*.last")
    named.unlink()

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(module, name, refused)
    assert make(source) == 42
    assert not list(cache.glob("answer-*.last*"))
