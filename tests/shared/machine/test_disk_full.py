"""A full disk has one reason, whoever finds it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from slipway.errors import QuantizationError
from slipway.machine.shortages import translate_disk_full


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["space", "quota"])
def test_it_is_the_stages_own_error_and_names_the_folder(tmp_path: Path, number: int) -> None:
    with (
        pytest.raises(QuantizationError, match="for the weights") as caught,
        translate_disk_full(QuantizationError, "for the weights", at=tmp_path),
    ):
        raise OSError(number, "refused")
    assert (caught.value.reason, caught.value.retryable) == ("DISK_FULL", True)
    assert caught.value.about == {"folder": str(tmp_path)}


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), translate_disk_full(QuantizationError, "for the weights", at=tmp_path):
        (tmp_path / "missing").read_bytes()
