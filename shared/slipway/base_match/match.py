"""The verdict on a base model: one status with the reason for it, that travels from the command to the report."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field

from slipway.texts import one_line

STATUS_LABEL, REASON_LABEL = "base_match", "base_match_reason"
"""Labels of an export that carry what the files tell."""

_REASON_BYTES = 1500  # a coordinator takes labels of 2,048 bytes


class BaseMatchStatus(StrEnum):
    """What speaks for the base model in use."""

    CONFIRMED = "confirmed"
    """Files: it is the model that the adapter names, or has its weights."""
    MEASURED = "measured"
    """Validation: the adapter clearly helps it on text."""
    UNPROVEN = "unproven"
    """Neither files nor validation can tell."""
    TRUSTED = "trusted"
    """Files speak against it, and the user said ``base_model.trust: true``."""


_HEADLINES = {
    BaseMatchStatus.CONFIRMED: "Base model confirmed",
    BaseMatchStatus.MEASURED: "Base model confirmed by measurement",
    BaseMatchStatus.UNPROVEN: "Base model unproven",
    BaseMatchStatus.TRUSTED: "Base model taken on trust",
}


class BaseMatch(BaseModel):
    """Whether the base model in use is the one the adapter was trained on. A base that is not is refused, and has none of these.

    Attributes:
        status: What speaks for it.
        reason: Why, in one sentence.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    status: BaseMatchStatus
    reason: str

    @computed_field  # type: ignore[prop-decorator] # mypy has no rule for decorators above property
    @property
    def verdict(self) -> Literal["green", "amber"]:
        """Green when files or validation speak for the base, otherwise amber."""
        proven = (BaseMatchStatus.CONFIRMED, BaseMatchStatus.MEASURED)
        return "green" if self.status in proven else "amber"

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        return _HEADLINES[self.status]

    def labels(self) -> dict[str, str]:
        """This verdict as labels of an export."""
        reason = one_line(self.reason).encode()[:_REASON_BYTES].decode(errors="ignore")
        return {STATUS_LABEL: self.status.value, REASON_LABEL: reason}

    @classmethod
    def of_labels(cls, labels: Mapping[str, str]) -> BaseMatch:
        """The verdict of the files that an export's labels carry; unproven where a client gave none."""
        try:
            status = BaseMatchStatus(labels.get(STATUS_LABEL, ""))
        except ValueError:  # of no client of ours, or of a newer one
            status = BaseMatchStatus.UNPROVEN
        reason = labels.get(REASON_LABEL) or "the base model was not compared with the one the adapter names"
        return cls(status=status, reason=reason)
