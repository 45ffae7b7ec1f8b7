"""Samples [B, C, *spatial] as rows [B * positions, C]: the channels of each position are a row."""

from torch import Tensor


class ChannelRows:
    """A tensor [B, C, *spatial] that is read and written by ranges of its rows.

    A range is one of `split_rows`: complete samples, or some positions of one sample.  Its rows are copied, and no
    others.

    Attributes:
        shape: the numbers of rows and of channels.
    """

    __slots__ = ("_planes", "shape")

    def __init__(self, samples: Tensor) -> None:
        self._planes = view_planes(samples)
        count, channels, positions = self._planes.shape
        self.shape = (count * positions, channels)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, piece: slice) -> Tensor:
        """Return some rows, contiguous [rows, C]."""
        return self._slice_planes(piece).transpose(1, 2).reshape(-1, self.shape[1]).contiguous()

    def __setitem__(self, piece: slice, rows: Tensor) -> None:
        """Write some rows [rows, C], after a cast to the tensor's dtype."""
        planes = self._slice_planes(piece)
        planes.copy_(rows.view(planes.shape[0], -1, self.shape[1]).transpose(1, 2))

    def _slice_planes(self, piece: slice) -> Tensor:
        """View the samples and positions of some rows as [samples, C, positions]."""
        positions = self._planes.shape[2]
        first, start = divmod(piece.start, positions)
        stop = start + min(piece.stop - piece.start, positions)
        return self._planes[first : -(-piece.stop // positions), :, start:stop]


def view_planes(t: Tensor) -> Tensor:
    """View a tensor [B, C, *spatial] as [B, C, positions]."""
    return t.flatten(2) if t.dim() > 2 else t.unsqueeze(-1)
