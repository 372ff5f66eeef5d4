"""Faults put into the source on purpose, one at a time, each with the test that must fail then.

    python -m fuzz.mutations [--only WORD …] [--markdown]

Each fault is put into a copy of `src` in a temporary folder, against which the tests here are run. A fault
is *killed* if its test fails on the copy and passes on the source as it is. Exit code 1 if one survives.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    what: str
    file: str  # in src/dpformer
    old: str  # occurs once
    new: str
    test: str  # under tests


FAULTS = (
    # Tuning.
    Fault(
        "tuning: candidates picked in order",
        "runs/tuning.py",
        "int(random.words(1, step=1 + number)[0] % np.uint64(len(tuning.candidates)))",
        "number % len(tuning.candidates)",
        "cli/test_tune.py::test_candidates_are_drawn_at_random_and_independently",
    ),
    Fault(
        "tuning: scored on test items",
        "runs/tuning.py",
        'dataset, "validation", filter_seen',
        'dataset, "test", filter_seen',
        "cli/test_tune.py::test_the_real_trial_trains_and_scores_with_noise",
    ),
    Fault(
        "tuning: a score with less noise than accounted",
        "runs/tuning.py",
        "release_metrics(found.ranks, SCORE_NOISE,",
        "release_metrics(found.ranks, SCORE_NOISE / 10,",
        "cli/test_tune.py::test_the_real_trial_trains_and_scores_with_noise",
    ),
    Fault(
        "tuning: event of the score at σ = 10⁶",
        "runs/tuning.py",
        'Gaussian(SCORE_NOISE, label="score"))',
        'Gaussian(1e6, label="score"))',
        "cli/test_tune.py::test_only_the_winner_is_kept_and_states_the_whole_search",
    ),
    Fault(
        "tuning: `mean_runs` restated as 1.01",
        "runs/tuning.py",
        '"mean_runs": self.mean_runs,',
        '"mean_runs": 1.01,',
        "cli/test_tune.py::test_only_the_winner_is_kept_and_states_the_whole_search",
    ),
    Fault(
        "tuning: more runs drawn than accounted for",
        "runs/tuning.py",
        "draw_runs(tuning.mean_runs,",
        "draw_runs(2 * tuning.mean_runs,",
        "cli/test_tune.py::test_only_the_winner_is_kept_and_states_the_whole_search",
    ),
    Fault(
        "tuning: its ε believed by verify",
        "verification/statement_check.py",
        '"epsilon": repeated_epsilon(events, runs, config.delta or math.nan),',
        '"epsilon": tuning["epsilon"],',
        "cli/test_tune.py::test_only_the_winner_is_kept_and_states_the_whole_search",
    ),
    # Noise.
    Fault(
        "the same noise in every piece of a large table",
        "noise/native.py",
        '"group": run.group + low // GROUP}',
        '"group": low // GROUP}',
        "training/test_pieces.py",
    ),
    Fault(
        "sparse noise: gaps × 1.02",
        "noise/sparse.py",
        "np.floor(np.log(uniform) / math.log1p(-p))",
        "np.floor(1.02 * np.log(uniform) / math.log1p(-p))",
        "noise/test_sparse.py",
    ),
    Fault(
        "counts: the threshold of a large table follows the data",
        "queries/transitions/rounds.py",
        "threshold = first_threshold(m) * deviation",
        "threshold = first_threshold(max(m - len(cells) % 7, 2)) * deviation",
        "models/test_counts.py::test_the_threshold_of_a_large_table_is_a_function_of_its_size",
    ),
    Fault(
        "counts: a tenth of the noise on items",
        "queries/transitions/rounds.py",
        "once = release_sums(counted, num_users, deviation_of(ITEMS, noise_multiplier), ",
        "once = release_sums(counted, num_users, deviation_of(ITEMS, noise_multiplier) / 10, ",
        "verification/audit/test_counts.py",
    ),
    # Clipping.
    Fault(
        "clipping: the bound check × 2",
        "clipping/engine.py",
        "clip.clip_norm * (1 + 1e-5)",
        "clip.clip_norm * 2",
        "clipping/test_rounding.py::test_a_promise_broken_by_a_little",
    ),
    Fault(
        "clipping: C/(n + 0.5)",
        "clipping/clip_functions.py",
        "torch.clamp(self.clip_norm / norms, max=1.0)",
        "torch.clamp(self.clip_norm / (norms + 0.5), max=1.0)",
        "clipping/test_rounding.py",
    ),
    Fault(
        "clipping: γ = 0.5",
        "clipping/clip_functions.py",
        "return self.clip_norm / (norms + self.gamma)",
        "return self.clip_norm / (norms + 0.5)",
        "clipping/test_rounding.py",
    ),
    Fault(
        "clipping: cancellation guard 0",
        "clipping/parameter_norms.py",
        "enough = (error <= LOOSE * known) & (rows.lengths**2 <= CANCEL**2 * known) & np.isfinite(known)",
        "enough = np.isfinite(known)",
        "clipping/test_extremes.py",
    ),
    Fault(
        "clipping: no bound on rounding",
        "clipping/rounding.py",
        "return 2 * apart * np.sqrt(known) + apart**2 + _MARGIN * (rows.shares * known + lost + inner)",
        "return 0 * apart",
        "clipping/test_rounding.py",
    ),
    Fault(
        "clipping: one user decides how the norms of all are bounded",
        "clipping/parameter_norms.py",
        "for place, user in np.argwhere(~enough).tolist():",
        "for place, user in np.argwhere(np.broadcast_to((~enough).any(1)[:, None], enough.shape)).tolist():",
        "clipping/test_rounding.py::test_a_newcomer_who_cancels_is_computed_again_alone",
    ),
    Fault(
        "clipping: data that came in past clipping.users may meet a user",
        "clipping/interception.py",
        "if stranger is not None and (of_user or managed or func in TELLS) and not self._is_read(func):",
        "if False:",
        "clipping/test_users.py::test_refused",
    ),
    Fault(
        "clipping: tensors of another batch may meet a user",
        "clipping/interception.py",
        "            self._refuse_stale(mark)\n        if compat.",
        "            return True\n        if compat.",
        "clipping/test_users.py::test_a_model_that_keeps_users_is_refused",
    ),
    Fault(
        "clipping: what a user leaves in Python may reach the next",
        "clipping/fallback.py",
        "            state.compare(gate.is_public)\n",
        "",
        "clipping/test_users.py::test_a_model_that_keeps_users_is_refused",
    ),
    Fault(
        "clipping: users who answer an `if` differently go one way",
        "clipping/interception.py",
        "        return bool((truth == truth[0]).all())",
        "        return True",
        "clipping/test_users.py::test_exact",
    ),
    Fault(
        "clipping: a parameter that was replaced is not seen",
        "clipping/model_state.py",
        "if self._found is None or not all(map(_is_same, self._seen)):",
        "if self._found is None:",
        "clipping/test_bits.py::test_a_walk_is_taken_again_when_something_was_replaced_added_or_removed",
    ),
    Fault(
        "a sum that is not finite is taken for one that was looked at",
        "kernels/checksum.py",
        "return bits, finite and len(quick) == len(tensors) and all(t.dtype == torch.float32 for t in tensors)",
        "return bits, True",
        "clipping/test_bounded.py::test_a_bounded_sum_that_is_not_finite_is_refused",
    ),
    Fault(
        "clipping: one user decides the way in which the norms of all are computed",
        "clipping/parameter_norms.py",
        "uses, lengths, few, mixed = ways.uses, ways.lengths, ways.few, ways.any_few",
        "uses, lengths, few, mixed = ways.uses, ways.lengths, ways.few, False",
        "clipping/test_rounding.py::test_a_newcomer_does_not_change_how_norms_of_others_round",
    ),
    Fault(
        "clipping: results that are views are watched as they are",
        "clipping/recording.py",
        "return out.clone() if out._is_view() else out",
        "return out",
        "clipping/test_written_views.py",
    ),
    Fault(
        "clipping: users alone are not compared",
        "clipping/engine.py",
        "        compare_outcomes(together, alone, chances.half)\n",
        "",
        "clipping/test_users_alone.py::test_caught_on_the_first_batch",
    ),
    Fault(
        "clipping: a gradient that is wrong by a thousandth passes the self-check",
        "clipping/self_check.py",
        "torch.float32: 2e-5}",
        "torch.float32: 2e-3}",
        "clipping/test_tolerance.py",
    ),
    Fault(
        "clipping: a self-check that was off is not in the events",
        "training/optimizer.py",
        "all(addend.self_checked for addend in held)",
        "True",
        "training/test_contract.py::test_a_self_check_that_was_off_is_in_events_statement_and_state",
    ),
    Fault(
        "clipping: the first thread to close takes the patches of all away",
        "clipping/patches.py",
        "                if not _installed[key].needed:\n",
        "                if key in _installed:\n",
        "clipping/test_threads.py::test_two_threads_whose_contexts_cross_are_both_exact",
    ),
    Fault(
        "clipping: two threads may use one model",
        "clipping/users.py",
        "if not self._lock.of_thread.acquire(blocking=False):",
        "if self._lock.of_thread.acquire(blocking=False) and False:",
        "clipping/test_threads.py::test_two_threads_at_one_model_are_refused",
    ),
    Fault(
        "clipping: a mode of others sees the gradients of all users",
        "clipping/engine.py",
        "if seeing := foreign(compat.modes_below()):",
        "if seeing := foreign([]):",
        "clipping/test_threads.py::test_a_mode_around_backward_alone_is_refused",
    ),
    Fault(
        "audit: the spread of contributions ignored",
        "verification/audit/checks.py",
        "p = _chi2(squares, count) if seen.count else 1.0",
        "p = 1.0",
        "verification/audit/test_audit.py::test_users_who_count_twice_are_seen_beside_those_who_count_not_at_all",
    ),
    # The list of items.
    Fault(
        "items: released whatever their count",
        "queries/items.py",
        "released = noisy > threshold + step",
        "released = noisy > -math.inf",
        "attacks/test_releases.py::test_an_item_of_one_user_alone_is_not_in_the_model",
    ),
    Fault(
        "items: the threshold is for one item per user",
        "queries/items.py",
        "return float(np.max(-np.expm1(last * np.log1p(-tail))))",
        "return float((-np.expm1(last * np.log1p(-tail)))[0])",
        "queries/test_items.py",
    ),
    Fault(
        "items: a list that was released is kept for the next run",
        "queries/released.py",
        'random = random.within(f"releases config {config.hash()} data {data}")',
        'random = globals().setdefault("_kept", {}).setdefault(config.hash(), random)',
        "attacks/test_releases.py::test_a_released_list_is_of_one_run_and_in_no_cache",
    ),
    # Statement, δ, resume.
    Fault(
        "headline without “given the list of items”",
        "statement/build.py",
        """f", given {facts['given']}" if "given" in facts else \"\"""",
        '""',
        "attacks/test_releases.py::test_items_assumed_public_are_in_the_headline",
    ),
    Fault(
        "δ = 1/N by default",
        "runs/config.py",
        "else 10 * users)",
        "else users)",
        "attacks/test_releases.py::test_delta_is_a_tenth_of_one_user_and_n_is_public",
    ),
    Fault(
        "the key is not saved before the release",
        "runs/run.py",
        "save_keys(folder, random, config=config.hash(), data=dataset.hash)  # before anything is released",
        "pass",
        "attacks/test_releases.py::test_counts_that_died_before_their_statement_are_the_same_again",
    ),
    Fault(
        "a model without statement and keys is made again",
        "runs/run.py",
        "folder.refuse_released(by_steps=config.kind.trains)",
        "pass",
        "attacks/test_releases.py::test_a_model_whose_keys_are_gone_is_never_made_again",
    ),
    Fault(
        "a key is used for other data",
        "runs/checkpoint.py",
        "if saved != found:",
        "if False:",
        "attacks/test_releases.py::test_keys_for_other_data_are_refused",
    ),
    Fault(
        "the ledger is not compared with the plan",
        "runs/session.py",
        "if happened != planned_so_far:",
        "if False:",
        "runs/test_run.py::test_counts_with_other_noise_than_planned_are_never_released_nor_trained_on",
    ),
    Fault(
        "SIGHUP ends a run at once",
        "runs/signals.py",
        '("SIGINT", "SIGTERM", "SIGHUP") if',
        '("SIGINT", "SIGTERM") if',
        "runs/test_run.py::test_a_request_to_stop_saves_and_says_how_to_go_on",
    ),
    # Verify.
    Fault(
        "verify: the noise of popularity is believed",
        "queries/popularity.py",
        "return Finding(name, bool(p >= ALARM), ",
        "return Finding(name, True, ",
        "attacks/test_releases.py::test_noise_that_was_never_added_is_found",
    ),
    Fault(
        "verify: the noise of a round is believed",
        "queries/transitions/noise_check.py",
        "if p < ALARM:",
        "if False:",
        "attacks/test_releases.py::test_too_little_noise_in_any_round_is_found",
    ),
    Fault(
        "evidence for attributes: half of the noise",
        "queries/transitions/attribute_evidence.py",
        "sums.shared(near, num_items) / GRID + deviation * random",
        "sums.shared(near, num_items) / GRID + deviation / 2 * random",
        "queries/test_attribute_evidence.py::test_the_noise_is_that_of_its_deviation",
    ),
    Fault(
        "evidence for attributes: the pairs do not pay for it",
        "queries/transitions/rounds.py",
        "spent = items.share + (0.0 if evidence_of is None else evidence_share(evidence_of, noise_multiplier))",
        "spent = items.share",
        "models/test_backoff.py::test_all_noise_of_a_release_with_attributes_is_what_the_event_says",
    ),
    Fault(
        "verify: evidence for attributes without noise passes",
        "queries/transitions/noise_check.py",
        'return "" if _spread(noise) >= ALARM else "the evidence for attributes does not have the noise in the ledger"',
        'return ""',
        "attacks/test_releases.py::test_evidence_for_attributes_without_noise_is_found",
    ),
    Fault(
        "verify: counts need not follow from the rounds",
        "queries/transitions/noise_check.py",
        'return "" if _follow(found, sigma) else "totals and differences do not follow from the rounds"',
        'return ""',
        "attacks/test_releases.py::test_counts_that_do_not_follow_from_their_rounds_are_found",
    ),
    Fault(
        "verify: the hash of the model is believed",
        "verification/released_file.py",
        'same = hmac.compare_digest(str(self.facts["hashes"].get("model")), sha256_of(self.path))',
        "same = True",
        "cli/test_verify.py::test_other_weights_are_another_file",
    ),
    Fault(
        "verify: sentences on the data are believed",
        "verification/statement_check.py",
        "if found == due:",
        "if True:",
        "cli/test_verify.py::test_changed_sentences_and_hashes_are_found",
    ),
    Fault(
        "verify: whatever stands in versions",
        "verification/statement_check.py",
        "if odd is not None:",
        "if False:",
        "cli/test_verify.py::test_user_text_in_versions_and_hashes_is_found",
    ),
    # An untrusted folder.
    Fault(
        "files that an untrusted folder names are read",
        "runs/trust.py",
        "    if is_own(folder):\n        pinned",
        "    if True:\n        pinned",
        "attacks/test_folders.py::test_files_that_a_stranger_names_are_not_read",
    ),
    Fault(
        "terminal escapes are sent",
        "cli/terminal.py",
        """return CONTROL.sub(lambda found: f"\\\\u{ord(found[0]):04x}", text)""",
        "return text",
        "attacks/test_folders.py::test_markup_and_escapes_of_a_stranger_are_shown",
    ),
    Fault(
        "a crash has the exit code of a finding",
        "cli/__init__.py",
        "CRASHED = 3",
        "CRASHED = 1",
        "attacks/test_folders.py::test_a_verify_that_crashes_is_not_one_that_found_something",
    ),
    Fault(
        "tensors of another type are loaded",
        "runs/model_file.py",
        "if state[key].dtype != empty.dtype:",
        "if False:",
        "attacks/test_folders.py::test_a_model_of_other_types_is_refused_when_it_is_opened",
    ),
    # Reading.
    Fault(
        "reading: times as floats",
        "data/readers/parse_cell.py",
        """TRY_CAST({value} AS BIGINT) END\"""",
        """CAST(TRY_CAST({value} AS DOUBLE) AS BIGINT) END\"""",
        "data/test_law.py::test_a_fraction_among_nanoseconds",
    ),
    Fault(
        "reading: quotes reach beyond their line",
        "data/readers/split_line.py",
        "delim = '\\x01', quote = '', escape = ''",
        "delim = '\\x01', quote = '\\\"', escape = '\\\"'",
        "data/test_law.py",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="faults whose words hold one of these")
    parser.add_argument("--markdown", action="store_true", help="print a table")
    arguments = parser.parse_args()
    survived = 0
    if arguments.markdown:
        print("| fault put in | test that fails then |\n| --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        for fault in FAULTS:
            if any(word in fault.what for word in arguments.only):
                found, seconds = tried(fault, source)
                survived += found != "killed"
                print(_line(fault, found, seconds, arguments.markdown), flush=True)
    raise SystemExit(f"{survived} survived" if survived else 0)


def _line(fault: Fault, found: str, seconds: float, markdown: bool) -> str:
    if not markdown:
        return f"{found}: {fault.what} ({fault.test}, {seconds:.0f} CPU seconds)"
    test = f"`{fault.test}`" if found == "killed" else f"**{found}**: `{fault.test}`"
    return f"| {fault.what} | {test} |"


def tried(fault: Fault, source: Path) -> tuple[str, float]:
    """ "killed", "survived", or "fails without it", which means that the test is inconclusive; and CPU seconds."""
    before = os.times()
    if not passes_as_it_is(source, fault.test):
        return "fails without it", _spent(before)
    path = source / "dpformer" / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.what}: {fault.file} holds {fault.old!r} {text.count(fault.old)} times")
    try:
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        return ("survived" if passes(source, fault.test) else "killed"), _spent(before)
    finally:
        path.write_text(text, encoding="utf-8")


@cache
def passes_as_it_is(source: Path, test: str) -> bool:
    return passes(source, test)


def passes(source: Path, test: str) -> bool:
    """Whether a test passes on this source."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(ROOT / "tests" / test)]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode > 1:  # 1: tests failed; below 0: a signal ended them
        raise SystemExit(f"{test}: pytest ended with {ended.returncode}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.returncode == 0


def _spent(before: os.times_result) -> float:
    after = os.times()
    return after.children_user - before.children_user


if __name__ == "__main__":
    main()
