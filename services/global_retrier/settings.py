"""Settings of the global retrier: those of every service. The schedules are in the pipe file."""

from typing import ClassVar

from services.core.process.settings import Settings


class RetrierSettings(Settings):
    """Holds back events until they are due for another round of attempts."""

    section: ClassVar[str] = "retrier"

    @classmethod
    def program(cls) -> str:
        return "python -m services.global_retrier"
