"""The rows of the input, in parts: files, standard input and datasets of the Hub, read once from beginning to end."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from toolkit.input_paths import expand, name_files
from toolkit.inputs import ROWS_WITH_ALL_COLUMNS, HubDataset, Input, InputFile, Row, Source, StandardInput

STANDARD_INPUT = StandardInput.name
HUB = "hub:"


@dataclass
class Part:
    """Rows of the input, in its order: the unit of work, of writing and of resuming."""

    number: int
    rows: list[Row]


def open_inputs(given: Sequence[str], delimiter: str | None = None, stdin_format: str | None = None) -> list[Input]:
    """The inputs, folders and patterns replaced by the files in them.

    Args:
        delimiter, stdin_format: see `InputFile` and `StandardInput`.

    Raises:
        OSError: a file or standard input is missing, or a folder or a pattern has no file.
        ValueError: an input is given twice, or its format is not known; or the delimiter is invalid.
    """
    found: list[Input] = []
    for name in given:
        if name == STANDARD_INPUT:
            found.append(StandardInput(stdin_format, delimiter))
        elif name.startswith(HUB):
            first, _, last = name.removeprefix(HUB).rpartition(":")
            found.append(HubDataset(first or last, last if first else "train", streaming=True, name=name))
        else:
            found += [InputFile(each, delimiter) for each in expand(name)]
    name_files([each for each in found if type(each) is InputFile])
    counts = Counter(each.identity for each in found)
    if twice := [str(each) for each in found if counts[each.identity] > 1]:
        raise ValueError(f"{twice[-1]} is given twice; expected each input once")
    return found


class Corpus(Source):
    """The rows of all inputs. Each is opened when the one before it has been read.

    Args:
        limit: use the first so many rows only.

    Attributes:
        rows_read: how many rows have been read, skipped parts included.
        empty: inputs without rows, of those that have been read.
    """

    def __init__(self, inputs: list[Input], limit: int | None = None):
        super().__init__(inputs)
        self.limit, self.rows_read, self.empty = limit, 0, []
        self.stream: Iterator[Row] | None = None

    def report_empty(self, one):
        self.empty.append(one.name)

    def first_rows(self) -> list[Row]:
        """The rows by which columns are found; standard input is left as it was.

        Raises:
            OSError, ValueError: an input cannot be read, or there are no rows.
        """
        self.stream = self.rows()
        found = list(islice(self.stream, ROWS_WITH_ALL_COLUMNS))
        if not found:
            raise ValueError(f"{self}: there are no rows")
        if any(isinstance(each, StandardInput) for each in self.inputs):
            self.stream = chain(found, self.stream)
        else:
            self.stream, self.empty = None, []
        return found

    def parts(self, part_rows: int, is_missing: Callable[[int], bool]) -> Iterator[Part]:
        """The parts whose number `is_missing`, in order. All rows are read."""
        stream = islice(self.stream or self.rows(), self.limit)
        number = 0
        while rows := list(islice(stream, part_rows)):
            self.rows_read += len(rows)
            if is_missing(number):
                yield Part(number, rows)
            number += 1

    def share(self) -> float | None:
        """How much of the input has been read, from 0 to 1; None if that is not known."""
        if self.limit is not None:
            return min(1.0, self.rows_read / self.limit)
        return None
