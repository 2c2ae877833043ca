"""Batches to other devices and into pinned memory: packed, and without waiting for them."""

from replaykit.transfer.moving import device_named, pin, to_device
from replaykit.transfer.packing import Packing, Piece, View, bytes_of, is_plain, pieces_of
from replaykit.transfer.staging import Arrival, Staging

__all__ = [
    "Arrival",
    "Packing",
    "Piece",
    "Staging",
    "View",
    "bytes_of",
    "device_named",
    "is_plain",
    "pieces_of",
    "pin",
    "to_device",
]
