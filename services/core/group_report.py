"""The autoscaler's report to the observer about one group of instances: its last decision, for the page and the command line."""

import msgspec

MAX_REPORT_BYTES = 16_384
_SHOWN, _TEXT = 10, 600


class GroupReport(msgspec.Struct, frozen=True):
    """size: the ordered number of instances. wanted: the size that the decision asks for; a frozen group does not get it. words:
    the reason, for a person. frozen: by whom and why; None: not frozen. failed: the failed instances, each with its fault.
    hot: the partition in which the lag is; None: none. at_ms: of the decision, by the autoscaler's clock.
    """

    group: str
    at_ms: int
    size: int
    wanted: int
    action: str
    reason: str
    words: str
    working: int = 0
    starting: int = 0
    leaving: int = 0
    failed: tuple[str, ...] = ()
    frozen: str | None = None
    hot: str | None = None
    dry_run: bool = False

    def cut(self) -> "GroupReport":
        """With texts and lists short enough for MAX_REPORT_BYTES."""
        failed = tuple(one[:120] for one in self.failed[:_SHOWN])
        rest = len(self.failed) - len(failed)
        return msgspec.structs.replace(
            self,
            words=self.words[:_TEXT],
            failed=(*failed, f"{rest} more") if rest else failed,
            frozen=self.frozen and self.frozen[:_TEXT],
            hot=self.hot and self.hot[:_TEXT],
        )
