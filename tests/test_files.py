"""Files and folders that appear whole or not at all, and what killed runs leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headwise import files
from headwise.errors import CheckpointError, HeadwiseError

WRITER = """
import sys
from headwise import files
with getattr(files, sys.argv[1])(sys.argv[2]) as path:
    (path / "part" if path.is_dir() else path).write_text("half")
    print("writing", flush=True)
    sys.stdin.read()
"""


HOLDER = """
import sys
from headwise import files
with files.lock_output(sys.argv[1]):
    print("writing", flush=True)
    sys.stdin.read()
"""


@contextmanager
def writer(kind: str, target: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of a write; it is killed at the end."""
    with background(WRITER, kind, str(target)) as process:
        yield process


@contextmanager
def background(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has printed its line and waits; it is killed at the end."""
    command = [sys.executable, "-c", program, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("kind", ["write_atomically", "write_folder_atomically"])
def test_leftovers_of_a_killed_process_are_removed_by_the_next_write(kind: str, tmp_path: Path) -> None:
    with writer(kind, tmp_path / "a.txt"):
        assert len(list(tmp_path.iterdir())) == 1
        with files.write_atomically(tmp_path / "b.txt") as file:  # the other process lives: its work is not touched
            file.write_text("whole")
        assert len(list(tmp_path.iterdir())) == 2
    with files.write_atomically(tmp_path / "b.txt") as file:
        file.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["b.txt"]


def test_live_writers_are_left_to_finish(tmp_path: Path) -> None:
    with writer("write_atomically", tmp_path / "a.txt") as process:
        assert files.remove_leftovers(tmp_path) == []
        process.communicate("")
        assert (tmp_path / "a.txt").read_text() == "half"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_working_folders_of_another_machine_are_removed_only_when_old(tmp_path: Path) -> None:
    folder = tmp_path / ".a.txt.headwise-00000000-0123456789abcdef"
    (folder / "new").mkdir(parents=True)
    (folder / "lock").touch()
    assert files.remove_leftovers(tmp_path) == []
    before = time.time() - files.OLD_AGE - 7
    os.utime(folder, (before, before))
    assert files.remove_leftovers(tmp_path) == [folder.name]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [".a.headwise-12", ".a.tmp", "a.headwise-00000000-0123456789abcdef", ".headwise"])
def test_other_hidden_folders_are_not_taken_for_leftovers(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    assert files.remove_leftovers(tmp_path) == [] and (tmp_path / name).exists()


@pytest.mark.parametrize("moment", ["before its lock", "while it was removed"])
def test_working_folders_without_a_lock_are_removed(moment: str, tmp_path: Path) -> None:
    folder = tmp_path / f".a.headwise-{files._machine()}-0123456789abcdef"
    (folder if moment == "before its lock" else folder / "new" / "a").mkdir(parents=True)
    assert files.remove_leftovers(tmp_path) == [folder.name] and not folder.exists()


KILLED = """
import os, signal, sys
from headwise import files
step = os.rename
os.rename = lambda *args: (step(*args), os.kill(os.getpid(), signal.SIGKILL))
with files.write_folder_atomically(sys.argv[1]) as folder:
    (folder / "new").touch()
"""


def test_a_replacement_killed_between_its_two_renames_is_finished(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    assert subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False).returncode == -signal.SIGKILL
    assert not target.exists()
    assert len(files.remove_leftovers(tmp_path)) == 1
    assert os.listdir(target) == ["new"] and os.listdir(tmp_path) == ["model"]


def test_a_folder_is_replaced_whole_and_private_where_asked(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for name, private, mode in (("one", False, 0o777 & ~files.umask()), ("two", True, 0o700)):
        with files.write_folder_atomically(target, private=private) as folder:
            (folder / name).touch()
        assert os.listdir(target) == [name] and target.stat().st_mode & 0o777 == mode
    with pytest.raises(RuntimeError), files.write_folder_atomically(target) as folder:
        raise RuntimeError
    assert os.listdir(target) == ["two"] and os.listdir(tmp_path) == ["model"]


def test_a_failed_rename_restores_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, step = tmp_path / "model", os.rename
    target.mkdir()
    (target / "old").touch()

    def rename(source: Any, destination: Any) -> None:
        if "new" in Path(source).parts:
            raise OSError(5, "Input/output error")
        step(source, destination)

    monkeypatch.setattr(os, "rename", rename)
    with (
        pytest.raises(
            CheckpointError, match="model' cannot be written: Input/output error; what was there before is un"
        ),
        files.write_folder_atomically(target, CheckpointError) as folder,
    ):
        (folder / "new").touch()
    assert os.listdir(target) == ["old"] and os.listdir(tmp_path) == ["model"]


def test_a_full_disk_is_one_line_for_every_exception_class(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    message = f'Error while serializing: I/O error: No space left on device (os error 28) at path "{tmp_path}/.tmp1"'
    for failure in (OSError(28, "No space left on device"), SafetensorError(message)):
        words = "x' cannot be written: No space left on device$"
        with pytest.raises(CheckpointError, match=words), files.write_atomically(tmp_path / "x", CheckpointError):
            raise failure
    with pytest.raises(SafetensorError, match="invalid"), files.write_atomically(tmp_path / "x"):
        raise SafetensorError("invalid header")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [files.write_atomically, files.write_folder_atomically])
def test_errors_name_the_path_that_was_asked_for_not_the_temporary_one(write: Any, tmp_path: Path) -> None:
    target = tmp_path / "it's ü"
    with pytest.raises(CheckpointError) as caught, write(target) as temporary:
        raise CheckpointError(f"{str(temporary)!r} cannot be written: No space left on device")
    assert str(caught.value) == f"{str(target)!r} cannot be written: No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_safetensors_own_temporary_files_are_inside_the_working_folder(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    with files.write_atomically(tmp_path / "x.safetensors") as file:
        save_file({"a": torch.ones(3)}, file)
        assert len(list(tmp_path.iterdir())) == 1
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o666 & ~files.umask()


def test_writing_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "a.txt")
    with files.write_atomically(tmp_path / "link") as file:
        file.write_text("whole")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "a.txt").read_text() == "whole"


def test_a_file_name_of_full_length_can_be_written(tmp_path: Path) -> None:
    for name in ("x" * 255, "é" * 127):
        with files.write_atomically(tmp_path / name) as file:
            file.write_text("whole")
        assert (tmp_path / name).read_text() == "whole"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("pipe", "pipe' is a device, socket or pipe; give a file"),
        ("folder", "folder' is a directory; give a file"),
        ("none/x", "none/x' cannot be written: No such file or directory"),
        ("x\0y", "cannot be written: it is not a path"),
        ("x" * 256, "cannot be written: File name too long"),
    ],
)
def test_a_path_that_cannot_be_a_file_is_refused(path: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HeadwiseError, match=words), files.write_atomically(os.path.join(tmp_path, path)) as file:
        file.write_text("whole")
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for path, words in (("file", "'file' is a file; give a directory"), (".", "'.' is the current directory")):
        with pytest.raises(HeadwiseError, match=words), files.write_folder_atomically(path):
            pass
    assert os.listdir(tmp_path) == ["file"]


def test_a_second_run_on_an_output_folder_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with background(HOLDER, str(out)) as process:
        words = rf"'{out}' is in use by another run \(process {process.pid} on .*\); wait for its end, or give another"
        with pytest.raises(CheckpointError, match=words), files.lock_output(out):
            pass
        with files.lock_output(tmp_path / "new" / "other"):
            assert not out.exists()  # to lock a folder does not make it
        process.communicate("")
        assert list(tmp_path.iterdir()) == []  # nor does it leave the parents that it made


def test_the_lock_of_a_killed_run_is_taken_over_and_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with background(HOLDER, str(out)):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]
    with files.lock_output(out):
        assert (tmp_path / ".out.lock").read_text().startswith(f"process {os.getpid()} on ")
    assert list(tmp_path.iterdir()) == []


def test_one_folder_has_one_lock_under_all_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    with files.lock_output(tmp_path / "out"):
        for name in ("out", "./out/", "link", "out/../out"):
            with pytest.raises(CheckpointError, match="in use by another run"), files.lock_output(name):
                pass


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / ".out.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match=r"\.out\.lock' cannot be opened"), files.lock_output(tmp_path / "out"):
        pass
    assert (tmp_path / "precious").read_text() == "kept"
