from benchmarks.peers.table import format_table


def row(server, per_second, *, size="1 MiB", connections="1", number=0, wrong=0):
    columns = {"server": server, "per_second": f"{per_second:.2f}", "size": size, "connections": connections}
    return columns | {"round": number, "wrong": wrong}


def test_a_table_has_medians_and_how_many_times_as_many_are_ours():
    rows = [
        *(row("other", rate, number=number) for number, rate in enumerate((10, 20, 90))),
        *(row("normserve", rate, number=number) for number, rate in enumerate((30, 40, 50))),
        row("other", 5, connections="8"),
        row("normserve", 40, connections="8"),
    ]
    assert format_table(rows).splitlines() == [
        "| server | 1 MiB, 1 | 1 MiB, 8 |",
        "|---|---|---|",
        "| normserve | 40/s | 40/s |",
        "| other | 20/s, 2.00 | 5/s, 8.00 |",
    ]


def test_wrong_answers_and_none_at_all_are_said():
    text = format_table([row("normserve", 10), row("other", 0, wrong=3)])
    assert "| other | 0/s, - |" in text
    assert "Wrong answers came from other." in text
