"""What tests of threads change in this process is undone."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
