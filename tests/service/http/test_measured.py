"""The headers of a response that say what its computation took."""

from normserve.http.measured import Measured


def test_headers_have_milliseconds_by_stage_and_whole_numbers():
    measured = Measured(0.001, 0.002, 0.0, 1.5e-6, 0.25, 8192, 1234.56, 3)
    assert dict(measured.headers()) == {
        b"server-timing": b"recv;dur=1.000000000, queue;dur=2.000000000, copy_in;dur=0.000000000, "
        b"kernel;dur=0.001500000, copy_out;dur=250.000000000",
        b"x-kernel-bytes": b"8192",
        b"x-kernel-bandwidth": b"1235",
        b"x-batch-size": b"3",
    }
