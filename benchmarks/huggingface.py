"""Hugging Face models trained privately beside plain training, and Opacus, in one process and in turns, on one thread.

    python -m benchmarks.huggingface            # the table "huggingface" of docs/results/speed.md
    python -m benchmarks.huggingface --peak gpt2-small 64 private   # the peak of one: GPT-2 with 124 M parameters

Width 128, 4 layers, 16 users of 64 or 128 tokens, 5,000 tokens in the vocabulary. CPU time, the best of many turns. A
step is everything: forward and backward pass, clipping, noise (ours; Opacus adds none here), AdamW. Peak memory is of a
process of its own for each contender, above what was there before the first step.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

import dpformer as dp
from benchmarks.page import RESULTS, put
from dpformer.training.allocator import keep_freed_memory

USERS, TOKENS, WIDTH, LAYERS = 16, 5_000, 128, 4
LENGTHS = (64, 128)
AIMS = {"gpt2": 0.84, "bert": 0.76, "lora": 0.91, "lora-attention": 0.91}
TITLES = {
    "gpt2": "GPT-2, tied",
    "bert": "BERT classifier",
    "lora": "GPT-2, LoRA of rank 8",
    "lora-attention": "the same in `c_attn` alone",
}
ADAPTED = {"lora": ["c_attn", "c_proj", "c_fc"], "lora-attention": ["c_attn"]}  # the latter is peft's default
Step = Callable[[], None]


def build(row: str, length: int) -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]:
    """A model, what gives each user one loss, and users' data."""
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = torch.randint(0, TOKENS, (USERS, length))
    places = torch.arange(length).repeat(USERS, 1)  # one row per user, which Opacus needs
    if row == "bert":
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": TOKENS}
        model: nn.Module = BertForSequenceClassification(BertConfig(intermediate_size=4 * WIDTH, **sizes))
        labels = torch.randint(0, 2, (USERS,))

        def classified(model: nn.Module, ids: Tensor, places: Tensor, labels: Tensor) -> Tensor:
            logits = model(input_ids=ids, position_ids=places, token_type_ids=torch.zeros_like(ids)).logits
            return nn.functional.cross_entropy(logits, labels, reduction="none")

        return model.train(), classified, (ids, places, labels)
    narrow = {"vocab_size": TOKENS, "n_positions": length, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**({} if row == "gpt2-small" else narrow)))
    if row in ADAPTED:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=8, target_modules=ADAPTED[row], fan_in_fan_out=True)
        model = get_peft_model(model, adapters)

    def continued(model: nn.Module, ids: Tensor, places: Tensor) -> Tensor:
        logits = model(input_ids=ids, position_ids=places, use_cache=False).logits[:, :-1]
        return nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(1)

    return model.train(), continued, (ids, places)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def plain(row: str, length: int) -> Step:
    model, losses, data = build(row, length)
    optimizer = adam(model)

    def step() -> None:
        losses(model, *data).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def private(row: str, length: int, noise_multiplier: float = 1.0, self_check: bool = True) -> Step:
    model, losses, data = build(row, length)
    clipping = dp.PhantomClipping(model, self_check=self_check)
    optimizer = dp.PrivateOptimizer(
        adam(model), noise_multiplier=noise_multiplier, clip_norm=1.0, expected_batch_size=float(USERS)
    )

    def step() -> None:
        with clipping.users(data) as user:
            loss = losses(model, *user)
        clipping.backward(loss, dp.normalize(1.0))
        optimizer.step()
        optimizer.zero_grad()

    return step


def opacus(row: str, length: int) -> Step:
    """Per-sample gradients by hooks, clipped and added up as its DPOptimizer does; no noise."""
    from opacus import GradSampleModule

    model, losses, data = build(row, length)
    wrapped = GradSampleModule(model, strict=False)
    optimizer, trainable = adam(model), [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        losses(wrapped, *data).sum().backward()
        norms = torch.stack([p.grad_sample.flatten(1).square().sum(1) for p in trainable]).sum(0).sqrt()  # type: ignore[attr-defined]
        factors = dp.normalize(1.0)(norms)
        for p in trainable:
            p.grad = torch.einsum("b,b...->...", factors, p.grad_sample)  # type: ignore[attr-defined]
            p.grad_sample = None  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()

    return step


CONTENDERS: dict[str, Callable[[str, int], Step]] = {
    "plain": plain,
    "private": private,
    "private, no noise": lambda row, length: private(row, length, 0.0),
    "private, no self-check": lambda row, length: private(row, length, self_check=False),
    "opacus": opacus,
}
TIMED = ("plain", "private", "private, no noise", "opacus")


def measure(row: str, length: int, turns: int) -> dict[str, Any]:
    """Milliseconds of CPU time a step, in turns; what fails says why."""
    best: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    for name in TIMED:
        try:
            steps[name] = CONTENDERS[name](row, length)
            steps[name]()  # the first one proves, and warms up
        except Exception as error:
            steps.pop(name, None)
            best[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
    for _ in range(turns):
        for name, step in steps.items():
            start = time.process_time()
            step()
            best[name] = min(best.get(name, float("inf")), 1000 * (time.process_time() - start))
    return best


def peak(row: str, length: int, name: str) -> float | None:
    """MiB above what was there before the first step, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.huggingface", "--peak", row, str(length), name]
    done = subprocess.run(command, capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def show_peak(row: str, length: str, name: str) -> None:
    step = CONTENDERS[name](row, int(length))
    before = most_memory()
    for _ in range(3):
        step()
    print(most_memory() - before)


def most_memory() -> float:
    """MiB of this process at most so far; ru_maxrss would begin with the peak of the process that started it."""
    with open("/proc/self/status") as status:
        return next(float(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


Case = tuple[str, int]  # a row, and the tokens of a user


def table(found: dict[Case, dict[str, Any]], peaks: dict[Case, dict[str, float | None]]) -> str:
    heads = "plain / private, time (aim) | without noise | plain / Opacus | memory, private / plain | Opacus / plain"
    lines = [f"| | tokens | {heads} |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for (row, length), times in found.items():

        def ratio(name: str, times: dict[str, Any] = times) -> str:
            return f"{times['plain'] / times[name]:.2f}" if isinstance(times.get(name), float) else "fails"

        def memory(name: str, case: Case = (row, length)) -> str:
            used, base = peaks[case].get(name), peaks[case].get("plain")
            return f"{used / base:.2f}" if used and base else "fails"

        cells = [f"{ratio('private')} (≥ {AIMS[row]:.2f})", ratio("private, no noise"), ratio("opacus")]
        lines.append(
            f"| {TITLES[row]} | {length} | " + " | ".join([*cells, memory("private"), memory("opacus")]) + " |"
        )
    failed = [
        f"- {TITLES[row]}, {length} tokens, {name}: `{why}`"
        for (row, length), times in found.items()
        for name, why in times.items()
        if isinstance(why, str)
    ]
    return "\n".join([*lines, *(["", "What failed:", "", *failed] if failed else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(AIMS), default=list(AIMS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument(
        "--peak", nargs=3, metavar=("ROW", "LENGTH", "CONTENDER"), help="only this peak, in this process"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if given.peak:
        show_peak(*given.peak)
        return
    cases = [(row, length) for row in given.rows for length in given.lengths]
    found = {case: measure(*case, given.turns) for case in track(cases, "time")}
    contenders = ("plain", "private", "opacus")
    peaks = {case: {name: peak(*case, name) for name in contenders} for case in track(cases, "memory")}
    for case in cases:
        print(*case, json.dumps({"ms": found[case], "MiB": peaks[case]}))
    text = table(found, peaks)
    print(text)
    put("huggingface", text, RESULTS / "speed.md")


if __name__ == "__main__":
    main()
