"""Send one event to its receiver, signed as Standard Webhooks says, and read from the response how that went."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from enum import StrEnum

from slipway.security.outgoing import Connections, opener, run_request
from slipway.texts import number_of, one_line, shortened
from slipway_coordinator.storage.deliveries import Delivery
from slipway_coordinator.webhooks.receivers import Receiver

_LONGEST_PAUSE = 3600
_STATUSES_OF_EVENTS = frozenset({400, 409, 413, 415, 422})
"""What is wrong with an event, and not with its receiver or with the address, key or rate that it asks for."""
_LONGEST_PROBLEM = 200


class Outcome(StrEnum):
    """How an attempt ended.

    DELIVERED: the receiver has the event. FAILED: it is tried again. GONE: the receiver wants it no more (410).
    """

    DELIVERED = "delivered"
    FAILED = "failed"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Attempt:
    """How an attempt ended.

    Attributes:
        outcome: The outcome.
        problem: What went wrong; never part of the address, which may hold a secret.
        pause_seconds: How long the receiver asks to wait before the next one.
        refuses_event: Whether it failed through the event, so that it says nothing of the receiver.
    """

    outcome: Outcome
    problem: str = ""
    pause_seconds: float = 0.0
    refuses_event: bool = False


async def post(receiver: Receiver, delivery: Delivery) -> Attempt:
    """Send an event once. Redirects are not followed, and of a response nothing but its head is read."""
    try:
        return await run_request(
            lambda connections: _post(receiver, delivery, connections),
            seconds=receiver.entry.timeout_seconds,
            thread="slipway-webhook",
        )
    except TimeoutError:
        return Attempt(Outcome.FAILED, f"it took longer than {receiver.entry.timeout_seconds:g} s")


def signed_headers(receiver: Receiver, delivery: Delivery, *, now: datetime) -> dict[str, str]:
    """Return the headers by which a receiver knows who sent an event, and when."""
    from standardwebhooks import Webhook

    seconds = now.replace(microsecond=0)
    signatures = [
        Webhook(secret).sign(msg_id=delivery.id, timestamp=seconds, data=delivery.body) for secret in receiver.secrets
    ]
    return {
        "Webhook-Id": delivery.id,
        "Webhook-Timestamp": str(int(seconds.timestamp())),
        "Webhook-Signature": " ".join(signatures),
    }


def _post(receiver: Receiver, delivery: Delivery, connections: Connections) -> Attempt:
    url = receiver.entry.url
    headers = {
        "Content-Type": "application/cloudevents+json; charset=utf-8",
        "User-Agent": "slipway",
        **signed_headers(receiver, delivery, now=datetime.now(UTC)),
    }
    request = urllib.request.Request(url, delivery.body.encode(), headers, method="POST")  # noqa: S310 - the file's check lets only HTTP pass
    try:
        with opener(url, connections, receiver.tls).open(request, timeout=receiver.entry.timeout_seconds):
            return Attempt(Outcome.DELIVERED)
    except urllib.error.HTTPError as error:
        with error:
            return _refusal(error.code, error.headers)
    except urllib.error.URLError as error:
        return Attempt(Outcome.FAILED, _shown(error.reason))
    except OSError as error:  # one of http.client is one, too: the receiver has closed the connection
        return Attempt(Outcome.FAILED, _shown(error))
    except (http.client.HTTPException, ValueError) as error:
        return Attempt(Outcome.FAILED, _shown_without_quotes(error))


def _refusal(status: int, headers: Message) -> Attempt:
    problem = f"it responded with status {status}"
    if status == http.HTTPStatus.GONE:
        return Attempt(Outcome.GONE, problem)
    if 300 <= status < 400:
        problem += ", and redirects are not followed"
    return Attempt(Outcome.FAILED, problem, _pause(headers), refuses_event=status in _STATUSES_OF_EVENTS)


def _pause(headers: Message) -> float:
    text = (headers.get("Retry-After") or "").strip()
    if not text or not set(text) <= set("0123456789"):
        return 0.0
    pause = number_of(text, most=_LONGEST_PAUSE)
    return float(_LONGEST_PAUSE if pause is None else pause)


def _shown_without_quotes(error: http.client.HTTPException | ValueError) -> str:
    """Return what went wrong without what was received: a receiver may repeat the address, and with it a secret in its path."""
    if type(error) in {http.client.HTTPException, http.client.LineTooLong}:  # their messages are fixed
        return _shown(error)
    if isinstance(error, http.client.BadStatusLine | http.client.UnknownProtocol):
        return "it did not respond with HTTP"
    return type(error).__name__


def _shown(error: object) -> str:
    return shortened(one_line(str(error)), _LONGEST_PROBLEM) or type(error).__name__
