"""toolkit.common: spellings of flags, groups, one-line errors and exit codes; and atomic files."""

import importlib
import os
import re
import subprocess
import sys
import tty
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from support.folders import SCRIPTS
from toolkit import common
from toolkit.common import CommandError, Parser, about, integer_from, require, with_underscores

# `train` has the parser of transformers.
COMMANDS = sorted({path.stem for path in SCRIPTS.glob("[a-z]*.py")} - {"train"})


@pytest.fixture
def parser() -> Parser:
    made = Parser("some/folder/command.py", "What it does.\n\nMore.")
    made.add_argument("source", nargs="?")
    made.group("model").add_argument("--num_beams", type=integer_from(1), default=1)
    return made


# ------------------------------------------------------------------------------------------------------------- spelling


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("--num-beams", "--num_beams"),
        ("--num_beams", "--num_beams"),
        ("--num-beams=a-b", "--num_beams=a-b"),
        ("--text=--two-words\n--x-y", "--text=--two-words\n--x-y"),
        ("--not-a-flag but a text", "--not-a-flag but a text"),
        ("a-b", "a-b"),
        ("-n-1", "-n-1"),
        ("---", "---"),
    ],
)
def test_hyphens_become_underscores_in_names_of_flags_only(given, parsed):
    assert with_underscores([given]) == [parsed]
    assert with_underscores(["--", given]) == ["--", given]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_every_command_has_underscores_and_a_group(name):
    parser = importlib.import_module(name).make_parser()
    for action in parser._actions:
        for spelling in action.option_strings:
            assert "-" not in spelling.lstrip("-"), spelling
    own = [action.title for action in parser._action_groups if action.title not in ("positional arguments", "options")]
    known = ["most used", "check", "data", "task", "model", "training", "evaluation", "computation", "output"]
    assert own == [title for title in known if title in own]
    assert not [action for action in parser._optionals._group_actions if action.dest != "help"]


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "one", ""])
def test_an_integer_that_is_none(text, parser, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([f"--num-beams={text}"])
    err = capsys.readouterr().err
    assert err == f"command.py: argument --num_beams: {text!r} is invalid; expected an integer of at least 1\n"


def test_help_shows_defaults_that_say_something(parser):
    data = parser.group("data")
    data.add_argument("--seed", type=int, default=0, help="of the split")
    data.add_argument("--quick", action="store_true", help="less")
    text = parser.format_help()
    assert "of the split (default: 0)" in text
    assert "less\n" in text
    assert text.index("model:") < text.index("data:")
    assert "What it does.\n\nMore." in text


# ----------------------------------------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    ("error", "code", "err"),
    [
        (ValueError("two\n lines"), 2, "command.py: two lines\n"),
        (OSError("no file"), 2, "command.py: no file\n"),
        (CommandError("it differs", exit_code=1), 1, "command.py: it differs\n"),
        (
            ModuleNotFoundError("x", name="datasets.io"),
            2,
            "command.py: datasets is not installed; in a clone of ScratchBert, run "
            'python -m pip install -c constraints.txt -e ".[train]"\n',
        ),
        (ModuleNotFoundError("no unknown", name="unknown"), 2, "command.py: no unknown\n"),
        (KeyboardInterrupt(), 130, "command.py: interrupted; all is well\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_errors_are_one_line_and_an_exit_code(error, code, err, parser, capsys):
    def work():
        raise error

    assert parser.run(work, interrupted="interrupted; all is well") == code
    assert capsys.readouterr().err == err


def test_the_list_of_commands_may_be_cut_off():
    """As in `scratchbert --help | head`."""
    command = [sys.executable, "-u", str(SCRIPTS / "__main__.py"), "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize("work", ["print('line')", "print('line', flush=True)"])
def test_a_command_whose_reader_has_gone_ends_without_a_word(work):
    """As in `command | true`, also if something is printed at the exit."""
    program = (
        "import atexit, sys; from toolkit.common import Parser; atexit.register(print, 'more'); sys.stdin.read(); "
        f"sys.exit(Parser('command.py', 'Does it.').run(lambda: {work}))"
    )
    command = [sys.executable, "-c", program]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **streams, cwd=SCRIPTS, text=True) as process:
        process.stdout.close()
        process.stdin.close()  # it writes only now
        assert (process.wait(), process.stderr.read()) == (141, "")


def test_bugs_keep_their_traceback(parser):
    def work():
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        parser.run(work)
    assert parser.run(work, expected=(RuntimeError,)) == 2
    assert parser.run(lambda: None) == 0
    assert parser.run(lambda: 1) == 1


def test_errors_name_what_they_are_about():
    with pytest.raises(CommandError, match=r"^my-model: no such file$"), about("my-model"):
        raise OSError("no such\nfile")
    with pytest.raises(KeyError), about("my-model"):
        raise KeyError("a bug")


def test_what_is_required_is_named_before_any_work(monkeypatch):
    monkeypatch.setattr(common.importlib.util, "find_spec", lambda name: None)
    message = r'onnx and onnxruntime are not installed; .* -e "\.\[bench\]"'
    with pytest.raises(CommandError, match=message):
        require("onnx", "onnxruntime")


# ---------------------------------------------------------------------------------------------------------------- files


def interrupted_while_writing(path):
    path.write_text("half")
    raise KeyboardInterrupt


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    common.write_json(path, {"ä": float("nan"), "y": [np.float32(1.5), torch.tensor(float("inf"))]})
    assert path.read_text("utf-8") == '{\n  "ä": null,\n  "y": [\n    1.5,\n    null\n  ]\n}\n'
    with pytest.raises(KeyboardInterrupt), common.atomic_file(path) as temporary:
        interrupted_while_writing(temporary)
    assert "null" in path.read_text()
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    target = tmp_path / "target"
    with common.atomic_folder(target) as folder:
        (folder / "old").touch()
    with pytest.raises(KeyboardInterrupt), common.atomic_folder(target) as folder:
        interrupted_while_writing(folder / "new")
    assert os.listdir(target) == ["old"]
    with pytest.raises(FileNotFoundError), common.atomic_folder(target) as folder:
        folder.rmdir()  # so that it cannot take the place of the old one
    assert os.listdir(target) == ["old"]
    with common.atomic_folder(target) as folder:
        (folder / "new").touch()
    assert (os.listdir(target), os.listdir(tmp_path)) == (["new"], ["target"])


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_link_stays_and_its_target_is_replaced(tmp_path, is_dangling):
    for name in ("links", "targets"):
        (tmp_path / name).mkdir()
    file, folder = tmp_path / "links" / "file.json", tmp_path / "links" / "folder"
    file.symlink_to("../targets/file.txt")
    folder.symlink_to("../targets/folder")
    if not is_dangling:
        (tmp_path / "targets" / "file.txt").write_text("old")
        (tmp_path / "targets" / "folder").mkdir()
    with common.atomic_file(file) as temporary:
        assert temporary.suffix == ".json"  # the format of a picture depends on it
        assert temporary.parent == tmp_path / "targets"  # the same disk
        temporary.write_text("new")
    with common.atomic_folder(folder) as new:
        (new / "new").touch()
    assert file.is_symlink()
    assert folder.is_symlink()
    assert (tmp_path / "targets" / "file.txt").read_text() == "new"
    assert os.listdir(tmp_path / "targets" / "folder") == ["new"]
    assert sorted(os.listdir(tmp_path / "targets")) == ["file.txt", "folder"]


@pytest.mark.parametrize("through_link", [False, True])
def test_a_pipe_and_a_device_receive_the_content(tmp_path, through_link):
    pipe, path = tmp_path / "pipe", tmp_path / "report.json"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as reader:
        read = reader.submit(pipe.read_text)
        if through_link:
            path.symlink_to(pipe)
        common.write_text(path if through_link else pipe, "x" * 100_000)  # more than a pipe holds
        assert read.result() == "x" * 100_000
    assert pipe.is_fifo()
    terminal, device = os.openpty()
    tty.setraw(device)
    common.write_text(Path(os.ttyname(device)), "text\n")
    assert os.read(terminal, 100) == b"text\n"
    assert Path(os.ttyname(device)).is_char_device()
    for descriptor in (terminal, device):
        os.close(descriptor)
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        common.write_text(path, "text")
    assert sorted(os.listdir(tmp_path)) == ["pipe", "report.json"]


def test_a_folder_is_no_file_to_write(tmp_path):
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        common.write_text(tmp_path, "text")
    common.write_text(tmp_path / "new" / "report.json", "text")
    assert os.listdir(tmp_path / "new") == ["report.json"]


def test_shipped_files_are_found_unless_there_is_one_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "configuration/tiny.json"
    assert common.find_shipped(name) == SCRIPTS.parent / name
    (tmp_path / "configuration").mkdir()
    (tmp_path / name).write_text("{}")
    assert common.find_shipped(name) == Path(name)
    assert common.find_shipped("nothing.json") == Path("nothing.json")
