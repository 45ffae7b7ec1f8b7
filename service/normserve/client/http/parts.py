"""The parts of a request as views of the bytes that are still to be sent."""

# One record of TLS; more than one part in it saves a record and a call.
_RECORD_BYTES = 16 * 1024


def coalesce_small(views: list[memoryview]) -> list[memoryview]:
    """Join the small views at the beginning into one."""
    small = b""
    for place, view in enumerate(views):
        if len(small) + len(view) > _RECORD_BYTES:
            return [memoryview(small), *views[place:]] if small else views
        small += view
    return [memoryview(small)] if small else views


def drop_sent(views: list[memoryview], sent: int) -> None:
    """Remove the first `sent` bytes from the views, in place."""
    while sent:
        if sent < len(views[0]):
            views[0] = views[0][sent:]
            return
        sent -= len(views.pop(0))
