"""Polling that keeps what it is told."""


class FakePolling:
    """Attributes: noted: "received" and "sent", in order."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def note_received(self) -> None:
        self.noted.append("received")

    def note_sent(self) -> None:
        self.noted.append("sent")
