"""What replicas share, without anything that would run them."""

import asyncio

import pytest
from normserve.errors import MethodNotAllowedError
from normserve.metrics.metrics import Metrics
from normserve.peers.replica_siblings import ReplicaMetricsTable, ReplicaScaling, ReplicaSiblings
from normserve.settings import Settings
from pydantic import ValidationError


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def board(clock):
    return ReplicaMetricsTable(clock)


def on(board: ReplicaMetricsTable):
    """The board as a replica reaches it."""

    async def exchange(process, number, text):
        return board.publish(process, number, text)

    return exchange


def scrape(replica: ReplicaSiblings, own: bytes) -> str:
    return asyncio.run(replica.render_metrics(own)).decode()


def test_a_scrape_of_one_shows_all_that_speak(board):
    one, other = ReplicaSiblings("a", on(board)), ReplicaSiblings("b", on(board))
    scrape(one, Metrics("a").render())
    text = scrape(other, Metrics("b").render())
    assert 'normserve_ready{process="a"} 0.0' in text
    assert 'normserve_ready{process="b"} 0.0' in text
    assert text.count("# TYPE normserve_ready gauge") == 1
    assert 'normserve_process_up{process="a"} 1.0' in text


def test_who_has_gone_is_shown_no_more(board, clock):
    board.publish("a", 1, b"old")
    clock.now += 60
    assert board.publish("b", 1, b"new") == {"b": b"new"}


def test_what_comes_late_does_not_undo_what_was_shown(board):
    board.publish("a", 2, b"later")
    assert board.publish("a", 1, b"earlier") == {"a": b"later"}


def test_without_the_board_a_replica_tells_of_itself():
    async def unreachable(process, number, text):
        raise ConnectionError

    text = scrape(ReplicaSiblings("a", unreachable), Metrics("a").render())
    assert 'normserve_ready{process="a"} 0.0' in text


def test_a_replica_keeps_the_board_informed(board):
    texts = iter([b"first", b"second"])
    posted = []

    async def exchange(process, number, text):
        posted.append((process, number, text))
        return {}

    async def play():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ReplicaSiblings("a", exchange).publish_regularly(lambda: next(texts))

    asyncio.run(play())
    assert posted == [("a", 1, b"first")]


def test_layers_cannot_be_changed_where_others_would_not_know():
    with pytest.raises(MethodNotAllowedError, match="checkpoint"):
        ReplicaSiblings("a", on(ReplicaMetricsTable())).require_changeable_layers()


def test_a_replica_owns_its_device_and_its_cores():
    settings = Settings(uds="/tmp/a.sock", devices="0,1")
    on_gpu = ReplicaScaling(device="gpu", cpus_per_replica=4).make_replica_settings(settings)
    assert (on_gpu.backend, on_gpu.uds, on_gpu.devices, on_gpu.cpu_threads) == ("triton", None, "", 4)
    on_cpu = ReplicaScaling(cpus_per_replica=0.5).make_replica_settings(settings)
    assert (on_cpu.backend, on_cpu.cpu_threads) == ("torch", 1)


def test_a_replica_answers_for_what_ray_answers_for():
    """Where Ray listens the settings do not know; names that are set hold there, too."""
    assert ReplicaScaling().make_replica_settings(Settings()).allowed_hosts == "*"
    assert (
        ReplicaScaling().make_replica_settings(Settings(allowed_hosts="api.example")).allowed_hosts == "api.example"
    )


def test_shared_memory_is_refused_before_a_replica_starts():
    with pytest.raises(ValueError, match="NORMSERVE_LOCAL must not be set"):
        ReplicaScaling().make_replica_settings(Settings(local="/run/normserve/normserve.sock"))
    with pytest.raises(ValueError, match="NORMSERVE_OIP_CUDA_SHARED_MEMORY must not be set"):
        ReplicaScaling().make_replica_settings(Settings(oip_cuda_shared_memory=True))


def test_regions_are_registered_with_one_replica():
    settings = Settings(oip_shared_memory="norms-")
    with pytest.raises(ValueError, match="NORMSERVE_OIP_SHARED_MEMORY needs one process"):
        ReplicaScaling(max_replicas=2).make_replica_settings(settings)
    assert ReplicaScaling(max_replicas=1).make_replica_settings(settings).oip_shared_memory == "norms-"


@pytest.mark.parametrize("frontends", ["2", "auto"])
def test_front_ends_are_refused_before_a_replica_starts(frontends):
    with pytest.raises(ValueError, match="NORMSERVE_FRONTENDS must not be set"):
        ReplicaScaling().make_replica_settings(Settings(frontends=frontends))


def test_grpc_is_refused_before_a_replica_starts():
    with pytest.raises(ValueError, match="NORMSERVE_GRPC_PORT must not be set"):
        ReplicaScaling().make_replica_settings(Settings(grpc_port=8001))


def test_the_replica_refuses_before_ray_does():
    settings = Settings(max_inflight_requests=10, drain_s=12)
    options = ReplicaScaling(device="gpu", max_replicas=8).make_deployment_options(settings)
    assert options["max_ongoing_requests"] > settings.max_inflight_requests
    assert options["graceful_shutdown_timeout_s"] >= settings.drain_s
    assert options["ray_actor_options"]["num_gpus"] == 1
    assert options["autoscaling_config"]["max_replicas"] == 8


@pytest.mark.parametrize("wrong", [{"max_replicas": 1, "min_replicas": 2}, {"replicas": 2}, {"device": "tpu"}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValidationError):
        ReplicaScaling(**wrong)
