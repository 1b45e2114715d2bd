"""What the autoscaler refuses to start with."""

import asyncio
from pathlib import Path

import pytest

from services.autoscaler.app import start
from services.autoscaler.settings import AutoscalerSettings
from services.core.process.lifecycle import Supervision
from services.core.process.settings import load_settings
from services.core.yaml_source import BadConfiguration


async def test_groups_need_a_platform(tmp_path: Path) -> None:
    """Broken: an operator gives groups their rules, nothing scales them, and nothing says so."""
    flags = ["--broker", f"log:{tmp_path}", "--management", "127.0.0.1:0", "--groups", '{"expel": {"max": 4}}']
    settings = await asyncio.to_thread(load_settings, AutoscalerSettings, flags, {})
    async with asyncio.TaskGroup() as group, asyncio.timeout(600):
        with pytest.raises(BadConfiguration, match="group_driver"):
            await start(settings, Supervision(group))
