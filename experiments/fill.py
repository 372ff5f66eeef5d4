"""Fills the store, the most informative run first: DPFORMER_DATA=FOLDER python -m experiments.fill [WORD ...]

Interrupt it at any time and start it again: finished runs are never computed twice, and others go on where they were.
Start it twice to use two cores (one thread each does more than one process with two). WORDs choose the cells whose
name has all of them.
"""

import argparse
import traceback

from experiments.literal import everything, queue
from experiments.store import fill, load

from dpformer.runs import Interrupted
from dpformer.training.allocator import keep_freed_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="only list the cells")
    parser.add_argument("--literal", action="store_true", help="only the study of Re-Attention as printed")
    arguments = parser.parse_args()
    keep_freed_memory()
    failed: list[str] = []
    for cell in queue(load) if arguments.literal else everything(load):
        if not all(word in cell.name for word in arguments.words):
            continue
        done = load(cell.name) is not None
        print(f"{'done' if done else 'to do':6} {cell.name}", flush=True)
        if done or arguments.list:
            continue
        try:
            fill(cell, arguments.threads)
        except Interrupted:
            raise SystemExit(130) from None
        except Exception:  # one run that fails does not keep the others waiting
            traceback.print_exc()
            failed.append(cell.name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
