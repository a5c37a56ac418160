"""Translate errors of an S3 service into ``ArtifactError``: which ones are temporary, and remedies for the others."""

from __future__ import annotations

from http import HTTPStatus
from xml.etree.ElementTree import ParseError

from minio.error import InvalidResponseError, MinioException, S3Error, ServerError
from urllib3.exceptions import HTTPError, MaxRetryError, SSLError

from slipway.errors import ArtifactError

#: Everything a call of the SDK raises for a fault of the service or the network. (ParseError: a response was cut short.)
S3_EXCEPTIONS = (MinioException, HTTPError, ConnectionError, TimeoutError, ParseError)
MISSING = frozenset({"NoSuchKey", "NoSuchObject", "ResourceNotFound", "NoSuchVersion", "NoSuchUpload"})
_BUSY = frozenset(
    {"InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown", "XMinioServerNotInitialized"}
)  # fmt: skip
_BUSY_STATUS = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_DENIED = frozenset(
    {"AccessDenied", "AuthorizationHeaderMalformed", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken",
     "RequestTimeTooSkewed", "SignatureDoesNotMatch"}
)  # fmt: skip
_FULL = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"})


def is_missing(error: BaseException) -> bool:
    """Return whether the service reported a missing object."""
    return isinstance(error, S3Error) and error.code in MISSING


def is_passing(error: BaseException) -> bool:
    """Return whether the same call may succeed a little later."""
    match error:
        case S3Error():
            return error.code in _BUSY or _is_passing_status(error.response.status)
        case ServerError():
            return _is_passing_status(error.status_code)
        case InvalidResponseError():
            return _is_passing_status(error._code)
        case MaxRetryError():
            return not isinstance(error.reason, SSLError)
        case SSLError():
            return False
    return isinstance(error, HTTPError | ConnectionError | TimeoutError | ParseError)


def _is_passing_status(status: int) -> bool:
    return status in _BUSY_STATUS or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def store_error(error: BaseException, doing: str, where: str) -> ArtifactError:
    """Return the error for a call that failed permanently."""
    about = {"store": where}
    code = error.code if isinstance(error, S3Error) else type(error).__name__
    what = f"{doing}: the store {where} answers {code}"
    if is_missing(error):
        return ArtifactError(what, reason="ARTIFACT_NOT_FOUND", about=about)
    if code in _DENIED or (isinstance(error, S3Error) and error.response.status == 403):
        remedy = "check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and their rights on the bucket"
        return ArtifactError(what, reason="STORE_DENIED", remedy=remedy, about=about)
    if code == "NoSuchBucket":
        remedy = "create the bucket, or correct its name"
        return ArtifactError(what, reason="STORE_INVALID", remedy=remedy, about=about)
    if code in _FULL:
        remedy = "free space in the bucket with slipway cache gc, or raise its quota"
        return ArtifactError(what, reason="DISK_FULL", remedy=remedy, about=about)
    if is_passing(error):
        remedy = "check that it runs and can be reached, then try again"
        return ArtifactError(f"{what} ({_cause(error)})", reason="STORE_UNAVAILABLE", remedy=remedy, about=about)
    remedy = "check the endpoint (AWS_ENDPOINT_URL; http:// for one without TLS), the region and the certificates"
    return ArtifactError(f"{what} ({_cause(error)})", reason="STORE_INVALID", remedy=remedy, about=about)


def _cause(error: BaseException) -> str:
    """Return the innermost message: urllib3 wraps errors and repeats URLs, which do not help the reader."""
    if isinstance(error, MaxRetryError) and error.reason is not None:
        error = error.reason
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
