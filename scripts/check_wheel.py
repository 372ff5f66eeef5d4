"""What an installed wheel must do: compiled kernels (not on Windows yet), no source tree, the main job.

python scripts/check_wheel.py     in an environment with the wheel, from any folder
"""

import os
import sys
import tempfile
from pathlib import Path


def main() -> None:
    os.chdir(tempfile.mkdtemp())
    import dpformer
    from dpformer.cli import main as dpformer_main
    from dpformer.kernels import native

    assert dpformer.__file__ is not None and Path(dpformer.__file__).is_relative_to(sys.prefix), dpformer.__file__
    compiled = native.kernels is not None
    assert compiled or sys.platform == "win32", "the kernels are not compiled"
    sys.argv = ["dpformer", "demo", "--quick"]
    try:
        dpformer_main()
    except SystemExit as error:
        assert not error.code, error.code
    assert Path("runs", "demo", "report.html").is_file()
    print(f"dpformer {dpformer.__version__}, compiled kernels: {compiled}")


if __name__ == "__main__":
    main()
