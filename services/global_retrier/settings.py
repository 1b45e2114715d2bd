"""Settings of the global retrier: what every service has. Schedules stand in the pipe file, which only expel reads."""

from typing import ClassVar

from services.core.settings import Settings


class RetrierSettings(Settings):
    """Holds back events until they are due for another round of attempts."""

    section: ClassVar[str] = "retrier"

    @classmethod
    def program(cls) -> str:
        """As in Settings."""
        return "python -m services.global_retrier"
