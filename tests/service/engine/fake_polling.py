"""Polling that keeps what it is told."""


class FakePolling:
    """Attributes: noted: "received" and "sent", in order."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def record_received(self) -> None:
        self.noted.append("received")

    def record_sent(self) -> None:
        self.noted.append("sent")
