"""What all pictures share."""

import functools
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.cli import how_to_install
from toolkit.files import atomic_file

DPI = 150


@functools.cache
def has_matplotlib() -> bool:
    """Whether matplotlib is installed; otherwise a line on standard error reports once that nothing is drawn."""
    is_installed = importlib.util.find_spec("matplotlib") is not None
    if not is_installed:
        print(f"no pictures are drawn: {how_to_install(['matplotlib'])}", file=sys.stderr)
    return is_installed


@contextmanager
def new_figure(path: Path, width: float, height: float) -> Iterator:
    """A `matplotlib.figure.Figure` with dark text on white, whatever the user's style. The end of the `with` block
    writes it.

    Args:
        path: of the PNG.
        width, height: in inches.
    """
    from matplotlib import style
    from matplotlib.figure import Figure
    from PIL import Image  # which matplotlib requires

    with style.context("default"):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="compressed")
        yield figure
        with atomic_file(Path(path)) as temporary, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # of a label in another script
            figure.savefig(temporary)
            with Image.open(temporary) as picture:
                picture.convert("RGB").quantize(128).save(temporary, optimize=True)  # a third of the size
