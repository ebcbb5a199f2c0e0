"""A filesystem of fsspec that is made like those of object stores, in memory: `parts://`.

Its files are fsspec's own buffered ones, as for S3 and its like: written in parts, there when the
upload is complete, read by ranges. Its errors are no OSErrors.
"""

from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class StoreError(Exception):
    """What the store's own client raises."""


class PartsFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file that is uploaded in parts."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.answer()
        self.parts.append(self.buffer.getvalue())
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        self.fs.contents[self.path] = b"".join(self.parts)

    def discard(self) -> None:
        self.parts = []

    def _fetch_range(self, start: int, end: int) -> bytes:
        self.fs.answer()
        content: bytes = self.fs.contents[self.path][start:end]
        return content


class PartsFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """One store for all, without folders of its own."""

    protocol = "parts"
    contents: dict[str, bytes] = {}  # noqa: RUF012 - shared, as a store is
    #: Whether the store does not answer.
    is_away = False

    def answer(self) -> None:
        if self.is_away:
            raise StoreError("could not connect to the endpoint")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> PartsFile:
        self.answer()
        if mode == "rb" and path not in self.contents:
            raise FileNotFoundError(path)
        size = len(self.contents[path]) if mode == "rb" else None
        return PartsFile(self, path, mode, size=size, **options)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.answer()
        path = self._strip_protocol(path)
        if path in self.contents:
            return {"name": path, "size": len(self.contents[path]), "type": "file"}
        if any(each.startswith(f"{path}/") for each in self.contents):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        self.answer()
        path = self._strip_protocol(path)
        rest = [each[len(path) + 1 :] for each in self.contents if each.startswith(f"{path}/")]
        names = sorted({f"{path}/{each.partition('/')[0]}" for each in rest})
        if not names:
            raise FileNotFoundError(path)
        return [self.info(each) for each in names] if detail else names

    def _rm(self, path: str) -> None:
        self.answer()
        path = self._strip_protocol(path)
        if path not in self.contents and self.info(path)["type"] == "directory":
            return
        del self.contents[path]


def register() -> None:
    """Makes fsspec know it."""
    fsspec.register_implementation("parts", PartsFileSystem, clobber=True)
