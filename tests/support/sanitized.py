"""A plugin of pytest: the library in C++ is the one that `make test-sanitized` compiles with sanitizers."""

from modeling_scratchbert.cpu import library
from support.folders import ROOT

OPENED = library.open_library(str(ROOT / "build" / "sanitized.so"))
# Before the other modules of `cpu` are imported, and only in this process.
library.find_library = lambda: ("avx2", OPENED)
