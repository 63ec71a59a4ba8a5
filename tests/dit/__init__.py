"""Tests of `dit`. Importing any of them skips it where diffusers is not installed."""

import pytest

pytest.importorskip("diffusers", reason="dit needs diffusers: pip install 'attnres-vision[video]'")
