"""The receiver of docs/delivery.md does what the page says."""

import asyncio
import base64
import re
import sys
from pathlib import Path

from services.core.undelivered import dead_letter
from tests.integration.expel_process import DEAD, hook, make_record, open_expel
from tests.support.ports import free_port

PAGE = Path(__file__).parents[2] / "docs" / "delivery.md"
SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()


async def test_the_receiver_on_the_page_works(tmp_path: Path) -> None:
    """Broken: who copies the page's receiver refuses our signatures, loses events or gets refused ones again and again."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "receiver.py").write_text(code)
    (tmp_path / "webhook.secret").write_text(SECRET + "\n")
    (tmp_path / "webhook.secret").chmod(0o600)
    port = free_port()
    receiver = await asyncio.create_subprocess_exec(
        sys.executable, "receiver.py", str(port), "webhook.secret", cwd=tmp_path, stdout=asyncio.subprocess.PIPE
    )
    assert receiver.stdout is not None
    try:
        async with open_expel(tmp_path) as expel:
            destination = hook("hook", f"http://127.0.0.1:{port}/", retry={"attempts": 20, "max_wait": "200ms"})
            destination["webhook"] |= {"secret": {"file": "webhook.secret"}}  # type: ignore[operator]
            expel.destinations.append(destination)
            amounts = [5, -1, 7]
            await expel.send_records([make_record(f"o-{a}", value=b'{"amount":%d}' % a) for a in amounts])
            await expel.start()
            await expel.wait_no_lag("hook")
            taken = {(await receiver.stdout.readline()).strip() for _ in range(2)}
            assert taken == {b"o-5", b"o-7"}
            (letter,) = await expel.read_all(DEAD, 1)
            assert letter.header("ce_id") == b"o--1"
            assert letter.header(dead_letter.REASON) == b"http_422"
            assert b"a negative amount" in (letter.header(dead_letter.DETAIL) or b"")
    finally:
        receiver.kill()
        await receiver.communicate()
