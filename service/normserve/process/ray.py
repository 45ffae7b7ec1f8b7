"""The application on Ray Serve: `serve run normserve.process.ray:build`, or `docker/ray/serve.yaml`."""

import asyncio
import contextlib
import functools
from collections.abc import Mapping

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from normserve.engine.engine import EngineState
from normserve.errors import NormserveError
from normserve.http.app import create_app
from normserve.http.application_services import ApplicationServices
from normserve.http.transport import AsgiAdapter
from normserve.peers.replica_siblings import ReplicaMetricsTable, ReplicaScaling, ReplicaSiblings
from normserve.settings import Settings

# One line per request costs more than a small request.
_QUIET = {"enable_access_log": False}


class RayReplica:
    """The deployment class for Ray Serve: one process with one device, which Ray Serve starts and stops."""

    def __init__(self, settings: Settings, board: DeploymentHandle) -> None:
        self._metrics_table = board
        self._siblings = ReplicaSiblings(serve.get_replica_context().replica_id.unique_id, self._publish)
        self._app = create_app(settings, siblings=self._siblings)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Build the application; called by Ray Serve on the event loop that will serve requests."""
        return _DelayedStartupApplication(self._app, self._siblings)

    def check_health(self) -> None:
        """Raise an error if the device has failed, so that Ray Serve replaces this replica.

        Raises:
            RuntimeError: the device has failed, and another process must replace this one.
        """
        service: ApplicationServices = self._app.state.service
        if service.engine.state is EngineState.FAILED:
            raise RuntimeError("the device has failed")

    async def _publish(self, process: str, number: int, text: bytes) -> Mapping[str, bytes]:
        """Publish this replica's metrics in the shared `ReplicaMetricsTable`, and return the texts of all live
        replicas.  Errors of Ray are raised as ConnectionError.
        """
        try:
            texts: Mapping[str, bytes] = await self._metrics_table.publish.remote(process, number, text)
        except (RayError, RayServeException) as error:
            raise ConnectionError("the board does not answer") from error
        return texts


class _DelayedStartupApplication:
    """An ASGI application whose startup completes only when the device is warm, since Ray Serve sends
    requests from then on.  Until its shutdown it also publishes metrics.
    """

    def __init__(self, app: FastAPI, replicas: ReplicaSiblings) -> None:
        self._app, self._replicas = app, replicas
        self._asgi_app = AsgiAdapter(app.state.entrance)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._asgi_app(scope, receive, functools.partial(_send_without_request_id, send))
            return
        posting: asyncio.Task[None] | None = None

        async def send_when_warm(message: Message) -> None:
            nonlocal posting
            if message["type"] == "lifespan.startup.complete":
                service: ApplicationServices = self._app.state.service
                try:
                    await self._app.state.warming
                except NormserveError as error:
                    message = {"type": "lifespan.startup.failed", "message": error.detail}
                else:
                    posting = asyncio.create_task(self._replicas.publish_regularly(service.metrics.render))
            await send(message)

        try:
            await self._asgi_app(scope, receive, send_when_warm)
        finally:
            if posting is not None:
                posting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await posting


async def _send_without_request_id(send: Send, message: Message) -> None:
    """Send an ASGI message without the header x-request-id, because Ray Serve adds its own to every response."""
    if message["type"] == "http.response.start":
        headers = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
        message = {**message, "headers": headers}
    await send(message)


def build(scale: ReplicaScaling) -> serve.Application:
    """Build the Ray Serve application, with the server's settings from this process's environment.

    Args:
        scale: Serve's `args`.
    """
    settings = scale.make_replica_settings(Settings(**{}))
    board = serve.deployment(
        ReplicaMetricsTable, name="board", ray_actor_options={"num_cpus": 0}, logging_config=_QUIET
    )
    ingress = serve.deployment(
        serve.ingress()(RayReplica),
        name="normserve",
        logging_config=_QUIET,
        **scale.make_deployment_options(settings),
    )
    return ingress.bind(settings, board.bind())
