"""What a feeder and the process of its card share: rows of tokens in, vectors out.

The memory has no name. It is gone with the last process that has it, whoever was killed.
"""

import mmap
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from marshal import dumps, loads
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from batchery_worker.models.text_items import ItemsSetup

#: Parts of the memory: for the pass that runs, the one behind it, and an urgent one.
SLOTS = 3

#: Minimum number of tokens for which a slot has room, and maximum number of its texts.
MIN_TOKENS, MAX_TEXTS = 65_536, 4096

_REQUEST, _REPLY = struct.Struct("<4I2?"), struct.Struct("<3If")


class Hello(NamedTuple):
    """The first message of a card's process to a feeder."""

    items: ItemsSetup
    #: What its results depend on; empty if they are not cached.
    identity: str
    version: str

    @property
    def slot_tokens(self) -> int:
        """For how many tokens a slot has room."""
        return max(MIN_TOKENS, self.items.max_length or 0)


class Request(NamedTuple):
    """What the process of the card is to compute: the texts of a slot."""

    slot: int
    texts: int
    #: Limits of the forward passes, as of a `Work`.
    max_batch_size: int
    max_batch_tokens: int | None
    keywords: Mapping[str, Any]
    is_urgent: bool = False
    #: Whether no other texts may be on the card meanwhile.
    is_alone: bool = False

    def dump(self) -> bytes:
        """The frame of it."""
        limits = self.max_batch_size, self.max_batch_tokens or 0
        head = (self.slot, self.texts, *limits, self.is_urgent, self.is_alone)
        return _REQUEST.pack(*head) + dumps({**self.keywords})

    @classmethod
    def load(cls, frame: bytes) -> Self:
        """Reads a frame."""
        slot, texts, size, tokens, *flags = _REQUEST.unpack_from(frame)
        keywords = loads(frame[_REQUEST.size :])
        return cls(slot, texts, size, tokens or None, keywords, *flags)


class Computed(NamedTuple):
    """The answer: the vectors of a slot are there."""

    slot: int
    #: D of these vectors.
    dimensions: int
    #: Tokens that were computed for it, with padding.
    tokens: int
    #: How long the card has computed for it, in milliseconds.
    took_ms: float
    #: Place of each text that failed, the name of its error in `batchery.errors`, and the text.
    failures: Sequence[tuple[int, str, str]] = ()

    def dump(self) -> bytes:
        """The frame of it."""
        head = (self.slot, self.dimensions, self.tokens, self.took_ms)
        return _REPLY.pack(*head) + dumps([*self.failures])

    @classmethod
    def load(cls, frame: bytes) -> Self:
        """Reads a frame."""
        slot, dimensions, tokens, took_ms = _REPLY.unpack_from(frame)
        return cls(slot, dimensions, tokens, took_ms, loads(frame[_REPLY.size :]))


class SharedRows:
    """The memory of one feeder, for S slots, I inputs, T tokens, B texts and D dimensions.

    Attributes:
        rows: Tokens of the texts of each slot, one text behind the other, (S, I, T) int32.
        ends: Where the texts end, behind a 0, (S, B + 1) int32.
        vectors: Their vectors, (S, B, D) float32.
        begun: Whether the card has begun with a slot, (S,) uint8.
    """

    def __init__(self, descriptor: int, hello: Hello) -> None:
        """Maps the memory, and closes the descriptor.

        Args:
            descriptor: Of a file in memory.
            hello: Says how large all is.
        """
        shapes = _shapes(hello)
        with open(descriptor, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _count_bytes(hello))
        arrays, start = list[NDArray[Any]](), 0
        for shape, dtype in shapes:
            count = int(np.prod(shape))
            arrays.append(np.frombuffer(self._memory, dtype, count, start).reshape(shape))
            start += arrays[-1].nbytes
        self.rows, self.ends, self.vectors, self.begun = arrays

    @classmethod
    def create(cls, hello: Hello, end: socket.socket) -> Self:
        """Makes the memory, and sends it to the process of the card."""
        descriptor = os.memfd_create("batchery-feeder")
        os.ftruncate(descriptor, _count_bytes(hello))
        socket.send_fds(end, [b"m"], [descriptor])
        return cls(descriptor, hello)

    @classmethod
    def receive(cls, hello: Hello, end: socket.socket) -> Self:
        """Takes the memory that a feeder has sent.

        Raises:
            EOFError: The feeder is gone.
        """
        _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
        if not descriptors:
            raise EOFError
        return cls(descriptors[0], hello)


def _shapes(hello: Hello) -> list[tuple[tuple[int, ...], type]]:
    inputs, tokens = len(hello.items.inputs), hello.slot_tokens
    return [
        ((SLOTS, inputs, tokens), np.int32),
        ((SLOTS, MAX_TEXTS + 1), np.int32),
        ((SLOTS, MAX_TEXTS, hello.items.dimensions), np.float32),
        ((SLOTS,), np.uint8),
    ]


def _count_bytes(hello: Hello) -> int:
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in _shapes(hello))
