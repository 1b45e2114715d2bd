"""What a verb of the command line raises when it cannot do what was asked."""


class CommandFailed(Exception):
    """A person's message: what failed (and where), and what to try. The process exits with `status`.

    status: 1 failed, 2 the command or its configuration is wrong, 130 stopped by Ctrl-C.
    """

    def __init__(self, what: str, remedy: str = "", *, status: int = 1) -> None:
        super().__init__(what)
        self.what, self.remedy, self.status = what, remedy, status
