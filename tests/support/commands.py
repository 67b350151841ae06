"""Running the commands of scripts/ in this process."""


def exit_code(command, *arguments) -> int:
    """The exit code of a module of a command with these arguments."""
    try:
        return command.main([str(each) for each in arguments])
    except SystemExit as stopped:
        return stopped.code
