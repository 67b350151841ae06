"""The rows of the input, in parts: files, standard input and datasets of the Hub, read twice from beginning to end."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from toolkit.input_paths import expand, name_files
from toolkit.inputs import ROWS_WITH_ALL_COLUMNS, HubDataset, Input, InputFile, Row, Source, StandardInput

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
        if name == StandardInput.name:
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
    """The rows of all inputs, which are read several times. Each is opened when the one before it has been read.

    Args:
        limit: use the first so many rows only.

    Attributes:
        repeated: what is wrong with rows, by their place among all rows, besides what their content shows.
        empty: inputs without rows, of those that have been read.
    """

    def __init__(self, inputs: list[Input], limit: int | None = None):
        super().__init__(inputs)
        self.limit = limit
        self.repeated: Mapping[int, str] = {}
        self.empty: set[str] = set()

    def report_empty(self, one):
        self.empty.add(one.name)

    def with_inputs(self) -> Iterator[tuple[Row, Input]]:
        """The rows, each with its input."""
        return islice(((row, one) for one in self.inputs for row in one.rows()), self.limit)

    def first_rows(self) -> list[Row]:
        """The rows by which columns are found.

        Raises:
            OSError, ValueError: an input cannot be read, or there are no rows.
        """
        found = list(islice(self.rows(), ROWS_WITH_ALL_COLUMNS))
        if not found:
            raise ValueError(f"{self}: there are no rows")
        return found

    def parts(self, part_rows: int, is_missing: Callable[[int], bool] = lambda number: True) -> Iterator[Part]:
        """The parts whose number `is_missing`, in order. All rows are read."""
        places = count()
        rows = islice(self.rows(), self.limit)
        number = 0
        while part := list(islice(rows, part_rows)):
            for row in part:
                row.content = self.repeated.get(next(places), row.content)
            if is_missing(number):
                yield Part(number, part)
            number += 1
