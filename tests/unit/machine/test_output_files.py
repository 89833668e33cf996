"""Files that users name for output: what is replaced, what is written into, and what is refused."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from dsl.machine.files import open_output, reason, why_not, write_output

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
NULL, FULL = os.makedev(1, 3), os.makedev(1, 7)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_reader_sees_the_old_text_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    path.write_text("old")
    path.chmod(0o604)
    with path.open() as reader:
        write_output(str(path), b"new", 0o644)
        assert reader.read() == "old"
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert names(tmp_path) == ["job.prom"]


def test_a_new_file_has_the_mode_that_is_asked_for_or_that_of_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_output(str(tmp_path / "all"), b"", 0o644)
        write_output(str(tmp_path / "some"), b"")
    finally:
        os.umask(old)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("all", "some")] == [0o644, 0o640]


@NEEDS_ROOT
def test_a_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    path.touch()
    os.chown(path, 12345, 54321)
    write_output(str(path), b"new")
    assert (path.stat().st_uid, path.stat().st_gid, path.read_bytes()) == (12345, 54321, b"new")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path, *, is_there: bool) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "file", tmp_path / "link"
    link.symlink_to("far/file")
    if is_there:
        target.write_text("old")
    assert why_not(str(link)) == ""
    write_output(str(link), b"new")
    os.close(open_output(str(link)))
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert (names(tmp_path), names(target.parent)) == (["far", "link"], ["file"])


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC])
def test_a_file_that_cannot_be_replaced_is_overwritten_unless_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """As a file that is mounted, in a container."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    path = tmp_path / "file"
    path.write_text("a long old text")
    before = path.stat().st_ino
    monkeypatch.setattr(os, "replace", refuse)
    if error == errno.ENOSPC:
        with pytest.raises(OSError, match="No space left"):
            write_output(str(path), b"new")
        assert path.read_text() == "a long old text"
    else:
        write_output(str(path), b"new")
        assert (path.read_text(), path.stat().st_ino) == ("new", before)
    assert names(tmp_path) == ["file"]


def test_a_file_without_a_name_is_overwritten(tmp_path: Path) -> None:
    """A program may hand one on as /proc/self/fd/3."""
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    try:
        os.write(fd, b"a long old text")
        write_output(f"/proc/self/fd/{fd}", b"new")
        assert os.pread(fd, 100, 0) == b"new"
    finally:
        os.close(fd)
    assert names(tmp_path) == []


@NEEDS_ROOT
@pytest.mark.parametrize("by_link", [False, True])
def test_a_device_is_written_into_and_stays(tmp_path: Path, *, by_link: bool) -> None:
    os.mknod(tmp_path / "null", 0o666 | stat.S_IFCHR, NULL)
    os.mknod(tmp_path / "full", 0o666 | stat.S_IFCHR, FULL)
    path = tmp_path / "null"
    if by_link:
        (tmp_path / "link").symlink_to("null")
        path = tmp_path / "link"
    try:
        assert why_not(str(path), read_again=True) == ""
    except PermissionError:
        pytest.skip("needs a file system with devices")
    write_output(str(path), b"gone", read_again=True)
    assert stat.S_ISCHR((tmp_path / "null").stat().st_mode)
    with pytest.raises(OSError, match="No space left on device"):
        write_output(str(tmp_path / "full"), b"text")


def test_the_machines_own_null_device_stays() -> None:
    """Only read here: no test of ours may risk it."""
    assert why_not("/dev/null", read_again=True) == ""


def test_a_pipe_gets_what_is_written_once_and_nothing_waits_for_its_reader(tmp_path: Path) -> None:
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device or address"):
        write_output(path, b"text")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_output(path, b"text")
        assert os.read(reader, 100) == b"text"
        with pytest.raises(OSError, match="no room for all of it"):
            write_output(path, bytes(1 << 20))
    finally:
        os.close(reader)
    assert "it is a pipe" in why_not(path, read_again=True)
    with pytest.raises(OSError, match="it is a pipe, which can be read only once"):
        write_output(path, b"text", read_again=True)
    assert stat.S_ISFIFO(os.stat(path).st_mode)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def make_file_in_place_of_folder(path: Path) -> None:
    path.parent.rmdir()
    path.parent.touch()


def make_disk(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(7, 250))


@pytest.mark.parametrize(
    "make, words",
    [
        (Path.mkdir, "it is a directory"),
        (make_socket, "it is a socket"),
        (make_disk, "it is a block device"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to("none/file"), "No such file or directory"),
        (make_file_in_place_of_folder, "Not a directory"),
        (lambda path: path.parent.rmdir(), "No such file or directory"),
    ],
    ids=["directory", "socket", "disk", "loop", "lost", "below-file", "nowhere"],
)
def test_what_no_output_can_be_is_said_before_and_when_it_is_written(
    tmp_path: Path, make: object, words: str
) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "out"
    make(path)  # type: ignore[operator]
    assert why_not(str(path)) == words
    for write in (lambda: write_output(str(path), b"text"), lambda: open_output(str(path))):
        with pytest.raises(OSError) as refused:  # noqa: PT011  the words are compared below
            write()
        assert reason(refused.value) == words


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    for path in ("\0", str(tmp_path / ("x" * 300))):
        assert why_not(path)
        with pytest.raises((OSError, ValueError)):
            write_output(path, b"text")


def test_where_all_may_make_files_a_link_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("old")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    link = tmp_path / "open" / "link"
    link.symlink_to(mine)
    assert why_not(str(link)) == "it is a link in a directory of all users"
    for write in (lambda: write_output(str(link), b"text"), lambda: open_output(str(link))):
        with pytest.raises(OSError, match="it is a link"):
            write()
    assert mine.read_text() == "old"


@NEEDS_ROOT
def test_where_all_may_make_files_those_of_another_user_are_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    theirs = tmp_path / "theirs"
    theirs.write_text("old")
    os.chown(theirs, 12345, -1)
    for write in (lambda: write_output(str(theirs), b"text"), lambda: open_output(str(theirs))):
        with pytest.raises(PermissionError, match="it belongs to another user"):
            write()
    assert theirs.read_text() == "old"


def test_a_look_makes_nothing_and_sees_what_is_not_ours_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not(str(tmp_path / "new")) == ""
    (tmp_path / "old").touch()
    closed = {str(tmp_path), str(tmp_path / "old")}
    monkeypatch.setattr(os, "access", lambda path, _mode: str(path) not in closed)
    assert why_not(str(tmp_path / "new")) == why_not(str(tmp_path / "old")) == "Permission denied"
    assert names(tmp_path) == ["old"]
