"""The objects that live as long as the server."""

import functools
import gc
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from normserve import __version__
from normserve.admission.keys import ApiKey, Keyring, KeysFileReader
from normserve.admission.permits import AdmissionBudget
from normserve.backends.backend_choice import make_backend_by_name
from normserve.backends.interface import Backend
from normserve.engine.batcher import Batcher
from normserve.engine.compilation_queue import CompilationQueue
from normserve.engine.engine import Engine
from normserve.engine.executor import Executor
from normserve.engine.progress import StallDetector
from normserve.http.oip.regions.file_regions import SharedMemoryFolder
from normserve.http.oip.regions.region_registry import RegionRegistry
from normserve.jobs.job import Op
from normserve.layers.checkpoint import register_checkpoint
from normserve.layers.layer_changes import FleetLayerChanges, LayerChanges
from normserve.layers.registry import LayerRegistry
from normserve.logs import audit, crash
from normserve.memory.shared_slabs import SharedSlabRegistry
from normserve.memory.slabs import PLAIN, SlabPool
from normserve.metrics.metrics import Metrics
from normserve.peers.sibling_processes import SiblingProcesses
from normserve.requests.layer_requests import load_layer_onto_device
from normserve.requests.memory_admission import MemoryAdmission
from normserve.requests.request_lifecycle import RequestServices
from normserve.settings import Settings

if TYPE_CHECKING:
    from normserve.traces.request_tracer import RequestTracer


class ApplicationServices:
    """The long-lived objects of a server process: engine, memory, layers, keys, metrics and tracer.

    The routes and the program that runs the server share them.
    """

    def __init__(
        self,
        settings: Settings,
        make_backend: Callable[[], Backend] | None = None,
        siblings: SiblingProcesses | None = None,
    ) -> None:
        self.settings = settings
        self.sibling_processes = siblings or SiblingProcesses(None)
        self.metrics = Metrics(self.sibling_processes.process_label)
        self.admission_budget = AdmissionBudget(
            max_requests=settings.max_inflight_requests,
            max_bytes=settings.max_inflight_bytes,
            stall_s=settings.body_grace_s / 5,
            on_revoked=self.metrics.observe_revocation,
        )
        self.metrics.track_inflight(
            lambda: self.admission_budget.request_count, lambda: self.admission_budget.used_bytes
        )
        # The memory that front ends receive into and send from.
        self.shared_slabs = SharedSlabRegistry()
        source = self.shared_slabs.make_allocator() if settings.frontend_count else PLAIN
        self.slab_pool = SlabPool(max_idle_bytes=settings.max_idle_slab_bytes, source=source)
        self.metrics.track_slabs(lambda: self.slab_pool.used_bytes, lambda: self.slab_pool.idle_bytes)
        prefix = settings.oip_shared_memory
        self.regions = RegionRegistry(
            SharedMemoryFolder(prefix) if prefix else None,
            settings.oip_shared_memory_bytes,
            shares_device_memory=settings.oip_cuda_shared_memory,
        )
        self.metrics.track_regions(lambda: self.regions.open_count, lambda: self.regions.open_bytes)
        self.layers = LayerRegistry(max_layers=settings.max_layers, max_bytes=settings.max_layer_bytes)
        self.metrics.track_layers(lambda: len(self.layers), lambda: self.layers.nbytes)
        batcher = Batcher(max_requests=settings.max_batch_requests, max_bytes=settings.max_batch_bytes)
        compilation = CompilationQueue(
            max_classes=settings.max_compiled_classes, max_per_minute=settings.max_compiles_per_minute
        )
        executor = Executor(make_backend or self._choose_backend)
        self.engine = Engine(executor, batcher, compilation, self.metrics)
        self.stall_detector = StallDetector(settings.stall_s, self.engine.launch_progress)
        self.metrics.track_stall(lambda: self.stall_detector.stalled_s)
        self.layer_changes = self._make_layer_changes()
        self.tracer = self._make_tracer()
        self.request_services = RequestServices(
            self.engine,
            self.admission_budget,
            MemoryAdmission(self.engine, settings.max_inflight_bytes),
            self.stall_detector.request_progress,
            self.metrics,
            settings.timeout_ms,
            self.tracer,
            settings.access_log,
            settings.access_log_probes,
        )
        self._keys_file = None if settings.api_keys_file is None else KeysFileReader(settings.api_keys_file)
        self.keyring = self._load_keyring()

    def _make_layer_changes(self) -> LayerChanges:
        """Make the object that registers and removes layers, in all processes if this is one of a fleet."""
        make = functools.partial(load_layer_onto_device, self.engine, self.layers)
        place = self.sibling_processes.position
        if place is None:
            return LayerChanges(self.layers, self.sibling_processes, make)
        return FleetLayerChanges(self.layers, self.sibling_processes, make, place.folder)

    def log_crash(self, what: str, error: BaseException | None = None) -> None:
        """Log that the process ends because of its own error, with device, settings and traceback.

        Args:
            what: the error, in a few words.
            error: its traceback is logged; None: the engine's last error is logged instead.
        """
        engine = self.engine
        crash.log_crash_report(
            what,
            version=__version__,
            settings=self.settings.dump_changed(),
            device=None
            if engine.device_description is None
            else f"{engine.device_description.name}, backend {engine.backend_name}",
            work=engine.failed_launch,
            trace=engine.last_error if error is None else "".join(traceback.format_exception(error)),
        )

    def _make_tracer(self) -> "RequestTracer | None":
        """Make the tracer that exports spans to a collector; return None if the settings name none."""
        endpoint = self.settings.trace_endpoint
        if endpoint is None:
            return None
        # A late import: the SDK is installed only where traces are used.
        from normserve.traces.export import make_exporting_tracer

        return make_exporting_tracer(
            endpoint,
            self.settings.trace_ratio,
            self.metrics.observe_dropped_spans,
            self.sibling_processes.process_label,
        )

    def _load_keyring(self) -> Keyring | None:
        """Read the accepted API keys and add metric series for them; return None if no key is required."""
        if self._keys_file is not None:
            keys = Keyring(self._keys_file.read())
        elif self.settings.api_key is not None:
            keys = Keyring.from_secret(self.settings.api_key.get_secret_value())
        else:
            return None
        self.metrics.add_key_series(keys.key_names)
        return keys

    async def reload_keys_on_change(self) -> None:
        """Read the file of API keys again whenever it changes, until cancelled."""
        if self._keys_file is not None:
            await self._keys_file.poll_changes(self._replace_keys)

    def _replace_keys(self, keys: tuple[ApiKey, ...]) -> None:
        """Accept `keys` in place of the present API keys, add metric series for them, and log the change.

        Called when the file of keys has changed.
        """
        assert self.keyring is not None
        self.keyring.replace_keys(keys)
        self.metrics.add_key_series(self.keyring.key_names)
        audit.log_keys_loaded(self.keyring.key_names)

    def _choose_backend(self) -> Backend:
        sizes = [int(size) for size in self.settings.warm_sizes.split(",")]
        return make_backend_by_name(self.settings.backend, self.settings.cpu_threads, self.slab_pool, sizes)

    async def warm_up_and_accept_jobs(self) -> None:
        """Start the device, register the layers of the checkpoint and of the other processes, then begin to accept
        jobs.

        Raises:
            NormserveError: the device cannot be used, or the checkpoint cannot be read.
        """
        self.layers.is_loading = True
        await self.engine.start()
        if self.settings.checkpoint is not None:
            op_without_bias = None if self.settings.checkpoint_op is None else Op(self.settings.checkpoint_op)
            await register_checkpoint(self.settings.checkpoint, op_without_bias, self.engine, self.layers)
        # The objects of torch and the routes are permanent.  Without this, the first full garbage collection visits
        # them all under load and delays every request by a tenth of a second.
        gc.collect()
        gc.freeze()
        await self.layer_changes.synchronise()
        self.layers.is_loading = False
        self.engine.accept_jobs()
