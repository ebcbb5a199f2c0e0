"""How a kind of model reads its items, wherever that happens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from batchery.errors import InvalidItem
from batchery.media_settings import MediaSettings
from batchery.settings import ModelSettings
from batchery.transport.payloads import Payloads
from batchery_worker.media.fetching import describe, fetch
from batchery_worker.media.items import Content, parse_item


class ReadItem(NamedTuple):
    """An item that was read beside its device: what its model's `preprocess` takes as it is."""

    value: Any


class Reader:
    """Makes of the bytes of an item what goes through a model.

    A kind names a subclass of this by the attribute `Reader` of its class. It is made from
    settings, and sent to the processes that read: it must be picklable until it is opened.
    """

    #: What an item may be, the kind's own medium first: `image` or `audio`, and perhaps `text`.
    fields: ClassVar[tuple[str, ...]]

    def __init__(self, settings: ModelSettings, media: MediaSettings) -> None:
        """Loads nothing yet.

        Args:
            settings: Of the model.
            media: Limits of what is read.
        """
        self.settings = settings
        self.media = media

    @property
    def medium(self) -> str:
        """The kind's own medium, for errors."""
        return self.fields[0]

    def open(self) -> None:
        """Loads what reading takes; called once in each process, before the first `read`.

        Raises:
            Exception: The model's files do not have it.
        """

    def read(self, data: bytes | str) -> Any:
        """Prepares one item; any error that it raises is that of this item alone.

        Args:
            data: The bytes of a picture or a recording, or a text.

        Returns:
            The prepared item, as `tokens` and `forward` of the model take it; picklable, and as
            small as possible, as it travels from one process to another.

        Raises:
            InvalidItem: It is not fit to run; one line says why.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read method")

    def read_here(self, item: Any) -> Any:
        """Fetches and reads an item in this process, on this thread; see `read`.

        Raises:
            InvalidItem: It cannot be had, or is not fit to run.
        """
        return self.read_data(self.fetch(self.parse(item)))

    def parse(self, item: Any) -> Content:
        """Finds out what an item is. Raises InvalidItem."""
        with self._naming_medium():
            return parse_item(item, self.fields, self.media)

    def fetch(self, content: Content, payloads: Payloads | None = None) -> bytes | str:
        """The bytes of an item, or its text; references to Redis need `payloads`.

        Raises:
            InvalidItem: It cannot be had.
        """
        with self._naming_medium():
            return fetch(content, self.media, payloads)

    @contextmanager
    def _naming_medium(self) -> Iterator[None]:
        try:
            yield
        except InvalidItem as error:
            raise InvalidItem(f"{self.medium}: {error}") from None

    def read_data(self, data: bytes | str) -> Any:
        """As `read`; whatever a decoder raises becomes an `InvalidItem`."""
        try:
            return self.read(data)
        except InvalidItem:
            raise
        except Exception as error:  # noqa: BLE001 - the code of any decoder, for any bytes
            medium = "text" if isinstance(data, str) else self.medium
            raise InvalidItem(f"{medium}: cannot be read: {describe(error)}") from None
