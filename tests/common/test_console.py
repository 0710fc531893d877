"""What is printed: by the first process, without control codes and secrets; and programs outlast their output."""

import errno
import io
import os
import shlex
import subprocess
import sys

import pytest

from liger_trainer.common.console import announce, guarded_output, visible


@pytest.mark.parametrize(("rank", "printed"), [(None, "liger-trainer: hi\n"), ("0", "liger-trainer: hi\n"), ("1", "")])
def test_the_first_process_speaks(monkeypatch, capsys, rank, printed):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    announce("hi")
    assert capsys.readouterr().out == printed


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Full:
    """A stream whose file takes nothing any more."""

    def __init__(self, number: int, path):
        self.number, self.file = number, open(path, "w")

    def write(self, text):
        raise OSError(self.number, os.strerror(self.number))

    def __getattr__(self, name):
        return getattr(self.file, name)


COLOUR, CURSOR = "\x1b[1;32mgreen\x1b[0m", "\x1b[2K\x1b[A\x1b[?25l"
ROW = "\x1b]52;c;cm0gLXJm\x07 \x1b[2J \x9b2J \x1bP \x08"


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_terminal_gets_colours_and_no_other_codes(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream())
    out = sys.stdout
    with guarded_output():
        print(COLOUR, ROW, "\t1\r2", CURSOR)
    shown = r"\x1b]52;c;cm0gLXJm\x07 \x1b[2J \x9b2J \x1bP \x08"
    ours = CURSOR if stream is Terminal else CURSOR.replace("\x1b", r"\x1b")
    assert out.getvalue() == f"{COLOUR} {shown} \t1\r2 {ours}\n"


def test_text_of_a_row_gets_none():
    assert visible(f"a\n{CURSOR}{COLOUR}") == "a\n" + (CURSOR + COLOUR).replace("\x1b", r"\x1b")


def test_what_an_encoding_lacks_is_written_out(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    with guarded_output():
        print("学生 ä")
    sys.stdout.flush()
    assert raw.getvalue() == b"\\u5b66\\u751f \xe4\n"


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 8), (errno.EPIPE, 0)])
@pytest.mark.parametrize("ends", [SystemExit(0), SystemExit(5)])
def test_a_program_goes_on_without_its_output(number, code, ends, monkeypatch, capsys, tmp_path):
    """A disk that is full is told by the exit code, a reader that has gone is not."""
    monkeypatch.setattr(sys, "stdout", Full(number, tmp_path / "log"))
    went_on = False
    with pytest.raises(SystemExit) as stopped, guarded_output():
        print("lost", flush=True)
        went_on = True
        raise ends
    assert went_on and stopped.value.code == (ends.code or code)
    assert ("No space left on device" in capsys.readouterr().err) == (stopped.value.code == 8)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_program_that_was_started_without_a_stream_goes_on(closed, tmp_path):
    program = """
import os, sys
from liger_trainer.common.console import guarded_output
with guarded_output():
    print("said"), print("said", file=sys.stderr), sys.stdin.read()
    file = open("kept.txt", "w")
    file.write(str(file.fileno() > 2))
    os.write(1, b"lost"), os.write(2, b"lost")
"""
    (tmp_path / "program.py").write_text(program)
    command = f"{shlex.quote(sys.executable)} program.py {closed}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, check=False)
    assert ended.returncode == 0 and (tmp_path / "kept.txt").read_text() == "True"


def test_another_error_of_a_stream_is_not_swallowed(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", Full(errno.EINVAL, tmp_path / "log"))
    with pytest.raises(SystemExit) as stopped, guarded_output():
        print("refused")
    assert stopped.value.code == 1
