"""The calls that `companions` times."""

import torch

from benchmarks.kernels.companions import CompanionCell, iterate_cells, make_calls


def test_the_companion_is_the_only_difference_of_two_calls():
    for is_channels_last in (True, False):
        cell = CompanionCell(torch.float32, (2, 32, 4, 4), is_channels_last)
        calls = make_calls(cell, "cpu")
        for pass_ in ("forward, residual", "backward, dy"):
            formats = {}
            for which in ("same", "other"):
                call = calls[f"{pass_} of the {which} format"]
                companion = call.keywords.get("residual", call.args[0])
                formats[which] = companion.is_contiguous(memory_format=torch.channels_last)
                assert isinstance(call(), tuple)
            assert formats == {"same": is_channels_last, "other": not is_channels_last}


def test_every_shape_is_in_both_formats():
    cells = list(iterate_cells())
    assert len({*cells}) == len(cells)
    assert {each._replace(is_channels_last=False) for each in cells if each.is_channels_last} == {
        each for each in cells if not each.is_channels_last
    }
