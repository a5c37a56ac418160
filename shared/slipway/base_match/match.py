"""The verdict on a base model: a status with its reason, passed on from the command to the report."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field

from slipway.texts import one_line

STATUS_LABEL, REASON_LABEL = "base_match", "base_match_reason"
"""Labels of an export that carry the verdict of the files."""

_REASON_BYTES = 1500  # a coordinator accepts labels of up to 2,048 bytes


class BaseMatchStatus(StrEnum):
    """Evidence for the base model in use."""

    CONFIRMED = "confirmed"
    """Files: it is the model that the adapter names, or has its weights."""
    MEASURED = "measured"
    """Validation: the adapter clearly helps it on text."""
    UNPROVEN = "unproven"
    """Neither files nor validation can tell."""
    TRUSTED = "trusted"
    """Files contradict it, and the user set ``base_model.trust: true``."""


_HEADLINES = {
    BaseMatchStatus.CONFIRMED: "Base model confirmed",
    BaseMatchStatus.MEASURED: "Base model confirmed by measurement",
    BaseMatchStatus.UNPROVEN: "Base model unproven",
    BaseMatchStatus.TRUSTED: "Base model taken on trust",
}


class BaseMatch(BaseModel):
    """Verdict on whether the base model in use is the one the adapter was trained on; a proven mismatch is refused instead.

    Attributes:
        status: The evidence for it.
        reason: The evidence, in one sentence.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    status: BaseMatchStatus
    reason: str

    @computed_field  # type: ignore[prop-decorator] # mypy has no rule for decorators above property
    @property
    def verdict(self) -> Literal["green", "amber"]:
        """Green if files or validation confirm the base, otherwise amber."""
        proven = (BaseMatchStatus.CONFIRMED, BaseMatchStatus.MEASURED)
        return "green" if self.status in proven else "amber"

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        return _HEADLINES[self.status]

    def labels(self) -> dict[str, str]:
        """Return this verdict as labels of an export."""
        reason = one_line(self.reason).encode()[:_REASON_BYTES].decode(errors="ignore")
        return {STATUS_LABEL: self.status.value, REASON_LABEL: reason}

    @classmethod
    def of_labels(cls, labels: Mapping[str, str]) -> BaseMatch:
        """Return the verdict in an export's labels; unproven if the client gave none."""
        try:
            status = BaseMatchStatus(labels.get(STATUS_LABEL, ""))
        except ValueError:  # set by another program, or by a newer client
            status = BaseMatchStatus.UNPROVEN
        reason = labels.get(REASON_LABEL) or "the base model was not compared with the one the adapter names"
        return cls(status=status, reason=reason)
