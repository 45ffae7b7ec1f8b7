from benchmarks.serve.callers.client import format_table


def row(transport, size, caller, p50_ms, over_socket):
    return {"transport": transport, "size": size, "caller": caller, "p50_ms": p50_ms, "over_socket": over_socket}


def test_the_table_has_medians_of_times_and_of_ratios():
    rows = [row("tcp", "4 KiB", "socket", f"{p50}", "1") for p50 in (1, 2, 9)]
    rows += [row("tcp", "4 KiB", "Client", f"{p50}", f"{ratio}") for p50, ratio in ((2, 2), (3, 1.5), (4, 0.4))]
    lines = format_table(rows).splitlines()
    assert lines[0] == "| tcp | socket, ms | Client, ms | over socket |"
    assert lines[2] == "| 4 KiB | 2 | 3 | 1.5 |"
