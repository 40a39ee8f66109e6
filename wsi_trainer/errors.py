"""The error a user can mend: it is shown as one line, without a traceback."""


class UserError(Exception):
    """Something in the input is wrong: a file, a key or a value, named by the message with the way out.

    The command line prints the message as one line on stderr and ends with `exit_code`; with `--debug` it
    shows the traceback too. Raise it as `raise UserError(...) from error`, so that the cause is kept.

    Args:
        message: what is wrong, where, and what would be right. One line.
        exit_code: the exit code of the process.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
