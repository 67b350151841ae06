"""The console script `scratchbert`: lists the commands, and runs the file of one.

`scratchbert NAME …` runs the same file as `python scripts/NAME.py …`. In an installation this folder is
`scratchbert_commands/scripts`, beside `scratchbert_commands/configuration`.
"""

import runpy
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent

USAGE = """\
usage: scratchbert COMMAND [--FLAG VALUE …]
       scratchbert COMMAND --help
       scratchbert --path COMMAND|FILE

--path prints where a command or a shipped file is, such as configuration/two_process.yaml:
accelerate launch "$(scratchbert --path train)" classification …

commands:"""


def command_files() -> dict[str, Path]:
    """The file of each command, by its name."""
    return {path.stem: path for path in sorted(SCRIPTS.glob("*.py")) if path.name != "__main__.py"}


def summary(path: Path) -> str:
    """The first line of a command's docstring. The file is not imported."""
    return path.read_text(encoding="utf-8").split('"""')[1].partition("\n")[0]


def listing() -> str:
    """The usage, and the commands with a line each."""
    return "\n".join([USAGE, *(f"  {name:30}{summary(path)}" for name, path in command_files().items())])


def fail(message: str) -> int:
    print(f"scratchbert: {message}", file=sys.stderr)
    return 2


def main() -> int:
    """Runs a command. Returns the exit code, unless the command exits itself."""
    arguments = sys.argv[1:]
    # As for `python scripts/NAME.py`: the folder of the file is where its imports are found.
    sys.path.insert(0, str(SCRIPTS))
    if not arguments or arguments[0] in ("-h", "--help"):
        from toolkit.common import continuing_when_output_is_closed

        with continuing_when_output_is_closed():
            print(listing(), flush=True)
        return 0
    name, *rest = arguments
    commands = command_files()
    if name == "--path":
        if len(rest) != 1:
            return fail("--path has no name; expected one command or shipped file")
        path = commands.get(rest[0], SCRIPTS.parent / rest[0])
        if not (path.exists() and path.is_relative_to(SCRIPTS.parent)):
            return fail(f"--path is {rest[0]}; expected a command or a shipped file")
        print(path)
        return 0
    if name not in commands:
        return fail(f"there is no command {name!r}; expected one of {', '.join(commands)}")
    sys.argv = [str(commands[name]), *rest]
    runpy.run_path(str(commands[name]), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
