"""The fixture `gpu`: the CUDA device, or a skip with the reason where there is none."""

import pytest

from minidist.base.device import device_of
from minidist.core.base.errors import UsageError


@pytest.fixture
def gpu():
    try:
        return device_of("cuda")
    except UsageError as error:
        pytest.skip(str(error))
