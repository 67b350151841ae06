"""The library of the commands. A command imports this package, `modeling_scratchbert` and third-party libraries, and
never another command."""
