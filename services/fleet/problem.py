"""The error of a command."""


class CommandFailed(Exception):
    """The command failed. what: the failure and its place; remedy: a thing to try; both for a person.

    status: the exit status: 1 failed, 2 wrong command or configuration, 130 stopped by Ctrl-C.
    """

    def __init__(self, what: str, remedy: str = "", *, status: int = 1) -> None:
        super().__init__(what)
        self.what, self.remedy, self.status = what, remedy, status
