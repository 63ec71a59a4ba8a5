"""What importing dit does, and what it says where diffusers is missing."""

import subprocess
import sys


def test_the_package_is_one_import() -> None:
    import dit

    assert set(dit.__all__) <= set(dir(dit)) and callable(dit.convert)
    assert "AttnResSD3Transformer2DModel" in dit.models.__all__


def test_without_diffusers_the_error_says_what_to_install() -> None:
    """And the ViT side of the library does without."""
    code = "import sys; sys.modules['diffusers'] = None; import attnres_vision; import dit"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert "ImportError: dit needs diffusers: pip install 'attnres-vision[video]'" in run.stderr
