"""What all pictures share."""

import functools
import sys

from toolkit.cli import how_to_install

DPI = 150


@functools.cache
def open_pyplot():
    """matplotlib.pyplot; None if it is not installed."""
    try:
        import matplotlib  # an extra
    except ImportError:
        print(f"no pictures are drawn: {how_to_install(['matplotlib'])}", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
