"""Progress bars of commands: on a terminal, and in a log file."""

import sys

from tqdm import tqdm


class LogLines(tqdm):
    """A progress bar for log files, with a line for each state instead of one that is overwritten."""

    displayed = -1

    @staticmethod
    def status_printer(file):
        def print_status(text: str) -> None:
            if text.strip():
                file.write(f"{text}\n")
                file.flush()

        return print_status

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.n != self.displayed:
            self.displayed = self.n
            super().display(msg, pos)

    @staticmethod
    def write(text: str) -> None:
        print(text, flush=True)


def progress_bar(total: int, **options) -> tqdm:
    """A bar in a terminal; in a log, a line a minute."""
    if sys.stderr.isatty():
        return tqdm(total=total, mininterval=0.5, dynamic_ncols=True, **options)
    return LogLines(total=total, mininterval=60, **options)
