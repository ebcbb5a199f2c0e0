"""Readers of items that do what no decoder should."""

import os
import time
from typing import Any, ClassVar

from batchery_worker.media.reader import Reader


class OddReader(Reader):
    """Reads texts that say what becomes of their reader."""

    fields: ClassVar[tuple[str, ...]] = ("image", "text")

    def read(self, data: bytes | str) -> Any:
        if data == "die":
            os._exit(1)
        if data == "hang":
            time.sleep(3600)
        if data == "raise":
            raise ArithmeticError("no\nsuch number")
        if data == "closure":
            return lambda: data
        return {"pid": os.getpid(), "data": data}


class UnopenedReader(OddReader):
    """Cannot be opened."""

    def open(self) -> None:
        raise ValueError("has no image processor")
