"""The calls of the API that the engine needs, in one namespace. Objects are the API's own, as dicts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.generic_resource import GenericNamespacedResource, create_namespaced_resource
from lightkube.types import CascadeType

from slipway.engines.kubernetes.states import Object
from slipway.errors import ServiceError

JOBS = create_namespaced_resource("batch", "v1", "Job", "jobs")
PODS = create_namespaced_resource("", "v1", "Pod", "pods")
DEPLOYMENTS = create_namespaced_resource("apps", "v1", "Deployment", "deployments")
SECRETS = create_namespaced_resource("", "v1", "Secret", "secrets")

GONE, MISSING = 410, 404
_CONFLICT, _MOST_REQUESTS = 409, 429
_PAGE = 500
_WATCH_SECONDS = 240
"""A watch is begun again after this time; one of which the network forgot the other end would be silent for ever."""
_SILENT_SECONDS = 300.0


class CallError(Exception):
    """A call failed.

    Attributes:
        code: HTTP status; 0 if there was no response.
        reason: Why, in one word of the API; empty if there was none.
        pause: Seconds that the server asks to wait.
    """

    def __init__(self, message: str, *, code: int = 0, reason: str = "", pause: float = 0.0) -> None:
        super().__init__(message)
        self.code, self.reason, self.pause = code, reason, pause

    @property
    def exists(self) -> bool:
        """Whether there is an object of this name. Two requests that change one quota at a time are a conflict, too."""
        return self.code == _CONFLICT and self.reason == "AlreadyExists"

    @property
    def refused(self) -> bool:
        """Whether the same call will never succeed. Rights and tokens (401, 403) may be given later."""
        return self.code in {400, 422}

    @property
    def unclear(self) -> bool:
        """Whether the call may have been done although it failed."""
        return self.code == 0 or self.code >= 500

    @property
    def passes(self) -> bool:
        """Whether the same call may succeed later."""
        quota = self.code == 403 and "exceeded quota" in str(self)
        conflict = self.code == _CONFLICT and not self.exists
        return quota or conflict or self.code in {0, _MOST_REQUESTS} or self.code >= 500


class Cluster:
    """A namespace of a cluster.

    Args:
        access: Where the API server is and who we are.
    """

    def __init__(self, access: Any) -> None:
        self.server = str(access.cluster.server)
        self.namespace = str(access.namespace)
        self._client = AsyncClient(access)

    async def create(self, kind: type[GenericNamespacedResource], thing: Object, *, dry_run: bool = False) -> None:
        """Create an object.

        Raises:
            CallError: It ``exists``, for example.
        """
        await self._call(self._client.create(kind(thing), dry_run=dry_run))

    async def replace(self, kind: type[GenericNamespacedResource], thing: Object) -> None:
        """Replace an object."""
        await self._call(self._client.replace(kind(thing), name=thing["metadata"]["name"]))

    async def get(self, kind: type[GenericNamespacedResource], name: str) -> Object:
        """Return an object."""
        return await self._call(self._client.get(kind, name))

    async def delete(self, kind: type[GenericNamespacedResource], name: str, *, waits_for_pods: bool = False) -> None:
        """Delete an object and what it owns; with ``waits_for_pods`` it is there until its pods have ended."""
        how = CascadeType.FOREGROUND if waits_for_pods else CascadeType.BACKGROUND
        await self._call(self._client.delete(kind, name, cascade=how))

    async def list(self, kind: type[GenericNamespacedResource], labels: Mapping[str, str]) -> tuple[list[Object], str]:
        """Return the objects with these labels, and the version of the list."""

        async def read() -> tuple[list[Object], str]:
            listing = self._client.list(kind, labels=dict(labels), chunk_size=_PAGE)
            things = [each async for each in listing]
            return things, listing.resourceVersion

        return await self._call(read())

    async def watch(
        self, kind: type[GenericNamespacedResource], labels: Mapping[str, str], version: str
    ) -> AsyncIterator[tuple[str, Object]]:
        """Yield the events after a version: ``ADDED``, ``MODIFIED`` or ``DELETED``, and the object. Return when there were none for long.

        Raises:
            CallError: ``GONE`` if the server does not know the version any more.
        """
        events = self._client.watch(
            kind, labels=dict(labels), resource_version=version, server_timeout=_WATCH_SECONDS
        ).__aiter__()
        try:
            while True:
                try:
                    async with asyncio.timeout(_SILENT_SECONDS):
                        event = await self._call(anext(events))
                except TimeoutError:
                    return
                yield event
        finally:
            await events.aclose()

    async def close(self) -> None:
        """End all calls."""
        await self._client.aclose()

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except ApiError as error:
            raise CallError(
                error.status.message or str(error),
                code=error.status.code or (error.response.status_code if error.response else 0),
                reason=error.status.reason or "",
                pause=_pause(error.response),
            ) from error
        except httpx2.HTTPStatusError as error:
            raise CallError(str(error), code=error.response.status_code, pause=_pause(error.response)) from error
        except (httpx2.HTTPError, OSError) as error:
            raise CallError(f"{type(error).__name__}: {error}") from error
        except (
            ConfigError,
            KeyError,
            ValueError,
        ) as error:  # no credentials; an error's answer without a content type; no JSON
            raise CallError(f"{type(error).__name__}: {error}") from error


def open_cluster(context: str, environment: Mapping[str, str]) -> Cluster:
    """Return the cluster of the pod's service account, or of a context of kubeconfig. No call is made.

    Raises:
        ServiceError: ``ENGINE_UNAVAILABLE``.
    """
    try:
        if not context and "KUBERNETES_SERVICE_HOST" in environment:
            return Cluster(KubeConfig.from_service_account().get())
        return Cluster(KubeConfig.from_file(environment.get("KUBECONFIG") or "~/.kube/config").get(context or None))
    except Exception as error:  # the library has no type for all that a file of somebody may lack
        raise ServiceError(
            f"no Kubernetes cluster can be reached with this configuration: {type(error).__name__}: {error}",
            reason="ENGINE_UNAVAILABLE",
            remedy="give --engine kubernetes:CONTEXT with a context that KUBECONFIG has and kubectl can use (a token, a certificate or an "
            "exec plugin; no auth-provider), or run the coordinator in the cluster",
            about={"context": context},
        ) from error


def _pause(response: httpx2.Response | None) -> float:
    text = "" if response is None else response.headers.get("Retry-After", "")
    return min(float(text), 60.0) if text.isdigit() else 0.0
