"""Searches for inputs that break a reader, by coverage: python -m fuzz TARGET [--seconds N] [--input FILE]

TARGET is a name of `fuzz.targets.TARGETS`, or `all`. A file that breaks a reader is kept and named; try it again with
--input. Exit code 1 then.
"""

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--input", type=Path, help="try this file instead of searching")
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)  # of the process that searches
    arguments = parser.parse_args()
    if arguments.corpus is not None:
        search(arguments.target, arguments.seconds, arguments.corpus)
        return
    from fuzz.targets import TARGETS, try_one

    if arguments.target != "all" and arguments.target not in TARGETS:
        parser.error(f"{arguments.target} is no target; there are all, {', '.join(TARGETS)}")
    if arguments.input is not None:
        with tempfile.TemporaryDirectory() as folder:
            read = try_one(TARGETS[arguments.target], arguments.input.read_bytes(), Path(folder))
        print("read" if read else "refused")
        return
    names = list(TARGETS) if arguments.target == "all" else [arguments.target]
    found = [supervise(name, arguments.seconds) for name in names]
    raise SystemExit(any("broken_by" in result for result in found))


def supervise(name: str, seconds: int) -> dict[str, Any]:
    """Searches in a process of its own: a crash of a library ends that process alone."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fuzz", name, "--seconds", str(seconds), "--corpus", folder]
        log = subprocess.run(command, capture_output=True, text=True, errors="replace")
    result: dict[str, Any] = {"target": name, **_counts(log.stderr)}
    artifact = re.search(r"Test unit written to (\S+)", log.stderr)
    if log.returncode:
        result["broken_by"] = artifact[1] if artifact else "no input"
        result["error"] = log.stdout[-3000:] + log.stderr[-3000:]
    print(json.dumps(result, ensure_ascii=False), flush=True)
    return result


def _counts(log: str) -> dict[str, int]:
    """Inputs tried and branches covered, from libFuzzer's last lines."""
    tried = re.findall(r"^(?:#|Done )(\d+)", log, re.MULTILINE)
    covered = re.findall(r"cov: (\d+)", log)
    return {"inputs": int(tried[-1]) if tried else 0, "branches": int(covered[-1]) if covered else 0}


def search(name: str, seconds: int, corpus: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["dpformer"], enable_loader_override=False):
        import dpformer

        for module in pkgutil.walk_packages(dpformer.__path__, "dpformer."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        from fuzz.targets import TARGETS, try_one
    target = TARGETS[name]
    folder = Path(tempfile.mkdtemp())
    for number, content in enumerate(target.seeds()):
        (corpus / f"seed{number}").write_bytes(content)
        assert try_one(target, content, folder)  # what is made once is made before the clock runs

    def one(content: bytes) -> None:
        try_one(target, content, folder)

    limits = ["-timeout=300", "-rss_limit_mb=6000", f"-max_total_time={seconds}", "-max_len=20000"]
    atheris.Setup([sys.argv[0], *limits, "-print_final_stats=0", f"-artifact_prefix={name}-", str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
