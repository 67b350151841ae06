"""Where things are in a clone."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS, CONFIGURATION = ROOT / "scripts", ROOT / "configuration"
DATA = ROOT / "tests" / "data"
# The code that a saved model has.
CODE = {path.name for path in (ROOT / "modeling_scratchbert").glob("*.py")} - {"__init__.py"}
