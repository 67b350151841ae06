"""Compares what a learner's functions return with the right results and with those of known mistakes."""

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from types import ModuleType

import torch
from transformers import BertModel

from modeling_scratchbert import ScratchBertModel
from toolkit.checkpoint import read_checkpoint
from toolkit.common import CommandError
from toolkit.course import FILES
from toolkit.hub import open_tokenizer

SENTENCES = ["The cat sat on the mat because it was tired.", "Yes.", "Shares fell on Monday, and rose on Tuesday."]
GAP = re.compile(r"\.\.\. +# your code|# Your (code|check)")  # in the files with gaps
RELATIVE, ABSOLUTE = 1e-4, 1e-5  # differences of rounding between correct solutions


class MistakeError(Exception):
    """A result is wrong. The message says how."""


class GapError(Exception):
    """Nothing has happened: the gap is not filled, or it is as the message says."""


class Weights:
    """A BERT, and a batch of sentences in it, from which the exercises get their inputs.

    Args:
        source: a folder or a hub id.

    Raises:
        ValueError: it is no BERT as the course writes it.
        OSError: a file cannot be read.
    """

    def __init__(self, source: str):
        self.source, checkpoint = source, read_checkpoint(source)
        found = {
            "kind": checkpoint.kind,
            "is_decoder": checkpoint.config.is_decoder,
            "hidden_act": checkpoint.config.hidden_act,
        }
        expected = {"kind": "bert", "is_decoder": False, "hidden_act": "gelu"}
        if found != expected:
            raise ValueError(f"{source} has {found}; expected {expected}. Pass the BERT of another --model.")
        self.model = ScratchBertModel.from_pretrained(source, attn_implementation="eager")
        self.bert = BertModel.from_pretrained(source)

        batch = dict(open_tokenizer(source)(SENTENCES, padding=True, return_tensors="pt"))
        batch["token_type_ids"][2, 5:] = self.model.config.type_vocab_size - 1
        attention, hidden = self.model.encoder.blocks[0].attention, batch["attention_mask"][:, None, None] == 0
        with torch.no_grad():
            self.batch = batch
            self.states = self.model.embeddings(batch["input_ids"], batch["token_type_ids"])  # (B, T, C)
            # Queries, keys and values of the heads of the first block, (B, H, T, D) each.
            self.heads = [attention._split_heads(each) for each in attention.project(self.states)]
            # Hides the padding of the batch: (B, 1, 1, T), additive.
            self.mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restores the inputs and the models afterwards.

        Raises:
            MistakeError: they have been changed.
        """
        inputs = [*self.batch.values(), self.states, *self.heads, self.mask]
        inputs += [weight for model in (self.model, self.bert) for weight in model.state_dict().values()]
        before = [each.clone() for each in inputs]
        try:
            yield
        finally:
            changed = [pair for pair in zip(inputs, before, strict=True) if not torch.equal(*pair)]
            for now, old in changed:
                now.copy_(old)
            self.model.eval()
        if changed:
            raise MistakeError("An argument is changed in place; compute a new tensor, as in x = x - mean.")


# ---------------------------------------------------------------------------------------------------------- comparison


def compare(actual, reference: Callable, mistakes: dict[str, dict], **right) -> None:
    """Compares a result with the right one. If it is that of one or two known mistakes, the error names them.

    Args:
        actual: what the learner's function returned.
        reference: returns the right result: a tensor, or a tuple of tensors.
        mistakes: from what is wrong, and what to do, to keyword arguments with which `reference` returns the wrong
            result.
        right: further keyword arguments of `reference`.

    Raises:
        MistakeError: the results differ.
        GapError: there is no result.
    """
    expected = reference(**right)
    if agree(filled(actual), expected):
        return
    for number in (1, 2):
        for names in combinations(mistakes, number):
            options = dict(right)
            for name in names:
                options |= mistakes[name]
            if agree(actual, reference(**options)):
                raise MistakeError(" ".join(names))
    raise MistakeError(difference(actual, expected))


def filled(result):
    """The result of a learner's function. Raises GapError if it is None."""
    if result is None:
        raise GapError("The result is None. Is a return missing?")
    return result


def agree(actual, expected) -> bool:
    """Whether two results have the same shapes, and the same values except for rounding."""
    if isinstance(expected, tuple):
        return (
            isinstance(actual, tuple)
            and len(actual) == len(expected)
            and all(agree(*pair) for pair in zip(actual, expected, strict=True))
        )
    return (
        isinstance(actual, torch.Tensor)
        and actual.shape == expected.shape
        and torch.allclose(actual.to(expected.dtype), expected, RELATIVE, ABSOLUTE, equal_nan=True)
    )


def difference(actual, expected, what: str = "the result") -> str:
    """How a result differs from the right one."""
    if isinstance(expected, tuple):
        if not isinstance(actual, tuple) or len(actual) != len(expected):
            return f"{what} is a {type(actual).__name__}; expected a tuple of {len(expected)} tensors."
        pairs = enumerate(zip(actual, expected, strict=True), start=1)
        return next(difference(*pair, f"tensor {i} of {what}") for i, pair in pairs if not agree(*pair))
    if not isinstance(actual, torch.Tensor):
        return f"{what} is a {type(actual).__name__}; expected a tensor of shape {tuple(expected.shape)}."
    if actual.shape != expected.shape:
        return f"{what} has shape {tuple(actual.shape)}; expected {tuple(expected.shape)}."
    distance = (actual.detach().double() - expected.detach().double()).abs().nan_to_num(torch.inf)
    place = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
    return (
        f"{what} has the right shape and wrong values, and it is not one of the known mistakes; the largest "
        f"difference is at {list(place)}: {actual[place]:.4g}, expected {expected[place]:.4g}."
    )


# --------------------------------------------------------------------------------------------------- the learner's file


def open_exercise(folder: Path, chapter: int) -> ModuleType:
    """Runs the learner's file of a chapter, and what it imports of the other chapters.

    Raises:
        CommandError: there is no such file.
        Exception: whatever the file raises.
    """
    path = folder / FILES[chapter - 1]
    if not path.is_file():
        raise CommandError(
            f"{folder} has no {path.name}; expected the file with the exercises of chapter {chapter}. "
            f"Run `scratchbert course start --folder {folder}`."
        )
    names = [Path(name).stem for name in FILES]
    for name in names:
        sys.modules.pop(name, None)  # of another folder, or of the file before it was changed
    sys.path.insert(0, str(folder.resolve()))
    # A file that changes twice in a second would be read from the bytecode of its first version.
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    importlib.invalidate_caches()
    try:
        return importlib.import_module(names[chapter - 1])
    finally:
        sys.path.remove(str(folder.resolve()))
        sys.dont_write_bytecode = writes_bytecode


def verdict(part: str, check: Callable, module: ModuleType, weights: Weights, folder: Path) -> tuple[str, str]:
    """Whether a part of the learner's file is right: "right", "WRONG" or "gap"; and a remark, or what is wrong."""
    try:
        torch.manual_seed(0)
        with weights.kept(), torch.enable_grad():
            remark = check(module, weights)
        return "right", remark or ""
    except MistakeError as error:
        return "WRONG", str(error)
    except GapError as error:
        return ("gap", "") if has_gap(module, part.partition(".")[0]) else ("WRONG", str(error))
    except (Exception, SystemExit) as error:
        return "WRONG", explained(error, folder)


def has_gap(module: ModuleType, name: str) -> bool:
    """Whether the source of a function or class still has the comment of a gap."""
    with suppress(TypeError, OSError):  # without source, as an object that partial() made
        return bool(GAP.search(inspect.getsource(getattr(module, name))))
    return False


def explained(error: BaseException, folder: Path) -> str:
    """An error, with the last line of the learner's files that was running, if there is one."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    own = [f" in {Path(file).name}, line {line}" for file, line in places if Path(file).parent == folder.resolve()]
    message = error.msg if isinstance(error, SyntaxError) else error
    return f"{type(error).__name__}{own[-1] if own else ''}: {message}"
