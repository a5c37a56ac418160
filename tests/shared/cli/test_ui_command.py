"""``slipway ui`` as a command: what it prints, how it opens a browser, and what it leaves."""

from __future__ import annotations

import signal
from pathlib import Path

from support.commands.cli import start
from support.coordinators.harness import wait_for


def test_a_browser_is_opened_without_the_key_in_its_words_and_nothing_is_left(tmp_path: Path) -> None:
    script, words, read, scratch = (tmp_path / name for name in ("browser", "words", "read", "scratch"))
    scratch.mkdir()
    script.write_text(f'#!/bin/sh\necho "$1" >{words}.new && cat "${{1#file://}}" >{read} && mv {words}.new {words}\n')
    script.chmod(0o755)
    process = start(["ui"], tmp_path / "home", BROWSER=f"{script} %s", TMPDIR=str(scratch))
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        key = address.partition("key=")[2]
        assert len(key) == 32
        wait_for(words.is_file)
        assert key not in words.read_text()
        assert address in read.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    assert not list(scratch.glob("slipway-ui-*"))
