"""Where a case's tensors lie while its kernels run, and what they hold afterwards."""

from __future__ import annotations

import torch


class Placement:
    """On "cpu" tensors stay where they are; on "cuda" their storages go there before a launch and come back after it.

    `left`: every storage handed to a launch, as it was after it, in order. `magnitudes`: for the launches of matrix
    products, by index in `left` of the result: the sum of the absolute products of each element, (rows, columns).
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.left: list[torch.Tensor] = []
        self.magnitudes: dict[int, torch.Tensor] = {}
        self._handed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a view of the same form of its storage's copy on the device."""
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        there = whole.cuda() if self.device == "cuda" else whole
        self._handed.append((whole, there))
        if self.device != "cuda":
            return tensor
        return there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def launched(self) -> None:
        """Bring back what the launch wrote."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        for whole, there in self._handed:
            if there is not whole:
                whole.copy_(there)
            self.left.append(whole.clone())
        self._handed.clear()

    def accumulates(self, a: torch.Tensor, b: torch.Tensor, rows: int) -> None:
        """The launch to come makes a @ b^T in the third tensor handed to it, which has `rows` rows."""
        sums = a.double().abs() @ b.double().abs().t()
        padding = torch.zeros(rows - len(sums), sums.shape[1], dtype=sums.dtype)
        self.magnitudes[len(self.left) + 2] = torch.cat([sums, padding])
