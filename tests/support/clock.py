"""A clock for tests of code that takes one."""


class Clock:
    """Seconds that stand still until a test moves them."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
