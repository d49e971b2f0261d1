"""The tests that run first: ``python -m pytest -m fast``, in less than a minute on two cores.

These are the tests of one process each that are not listed here. They are chosen by measure, not by folder: those that
are listed took the longest (``python -m pytest -n 0 --durations=0 -m "not processes"``).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/laws", "tests/simulation", "tests/unit")
"""Folders with fast tests. With ``-m fast`` no module of another one is imported."""

SLOW = frozenset(
    {
        "tests/laws/test_documents.py::test_a_checkpoint_loads_into_plain_pytorch",
        "tests/laws/test_documents.py::test_a_run_starts_from_python",
        "tests/laws/test_documents.py::test_the_quickstart_learns",
        "tests/laws/test_documents.py::test_the_readme_continues_that_run",
        "tests/laws/test_examples_in_docstrings.py",
        "tests/laws/test_fast_tier.py",
        "tests/laws/test_layers.py::test_a_run_without_servers_loads_no_module_that_uses_rpc",
        "tests/laws/test_refused.py::test_the_page_has_every_sentence_that_is_raised",
        "tests/laws/test_refused.py::test_the_page_has_sentences_of_all_kinds",
        "tests/laws/test_site.py",
        "tests/laws/test_torch_notes.py::test_every_file_and_test_that_a_note_names_exists",
        "tests/laws/test_torch_private.py::test_a_context_is_found_and_released",
        "tests/laws/test_torch_private.py::test_a_store_looks_up_names_until_a_lookup_fails",
        "tests/laws/test_torch_private.py::test_the_first_agent_publishes_its_address_where_a_star_agent_looks_for_it",
        "tests/laws/test_torch_private.py::test_threads_of_an_agent_keep_their_python_state",
        "tests/simulation/test_simulation.py",
        "tests/unit/buffers/test_buffer_models.py::test_a_drain_at_random_is_a_uniform_permutation",
        "tests/unit/buffers/test_buffer_models.py::test_eviction_is_uniform_over_seen_samples_only",
        "tests/unit/buffers/test_buffer_models.py::test_reservoir_keeps_its_invariants",
        "tests/unit/buffers/test_buffer_models.py::test_the_rest_of_a_batch_is_uniform_next_to_the_new_samples",
        "tests/unit/buffers/test_buffers.py::test_samples_put_in_groups_are_drawn_like_those_put_one_by_one",
        "tests/unit/buffers/test_buffers_stress.py::test_nothing_is_lost_and_nothing_is_repeated",
        "tests/unit/buffers/test_positions.py::test_it_agrees_with_a_counter",
        "tests/unit/buffers/test_storage.py::test_samples_put_together_are_those_put_one_by_one",
        "tests/unit/config/test_io.py::test_a_dumped_config_is_read_back_equal",
        "tests/unit/config/test_parsing.py::test_aliases_in_use_are_allowed",
        "tests/unit/config/test_parsing.py::test_dumped_values_are_read_back_by_every_yaml_reader",
        "tests/unit/config/test_parsing.py::test_files_that_cannot_be_read",
        "tests/unit/config/test_parsing.py::test_set_of_a_value_that_no_file_could_hold",
        "tests/unit/consistency/test_free_running.py::test_as_many_versions_as_allowed_are_retained_and_no_more",
        "tests/unit/consistency/test_free_running.py::test_backups_are_never_stale_and_some_come_too_late",
        "tests/unit/consistency/test_free_running.py::test_hypothesis_finds_no_run_that_breaks_a_rule",
        "tests/unit/consistency/test_free_running.py::test_staleness_is_within_its_limit_and_beyond_that_of_a_smaller_bound",
        "tests/unit/consistency/test_free_running.py::test_the_distance_of_clocks_reaches_the_bound_and_never_exceeds_it",
        "tests/unit/consistency/test_free_running.py::test_the_runs_reach_what_they_are_to_test",
        "tests/unit/consistency/test_free_running.py::test_whatever_happens_the_run_ends_as_it_must",
        "tests/unit/consistency/test_free_running.py::test_whatever_happens_while_trainers_leave_and_join_the_run_ends_as_it_must",
        "tests/unit/consistency/test_free_running.py::test_whatever_is_skipped_the_run_ends_as_it_must",
        "tests/unit/distributed/test_connection.py",
        "tests/unit/distributed/test_control_channel.py",
        "tests/unit/distributed/test_name_lookups.py::test_no_store_of_the_process_looks_up_a_name",
        "tests/unit/distributed/test_name_lookups.py::test_other_threads_make_as_many_attempts_as_before",
        "tests/unit/distributed/test_rendezvous.py",
        "tests/unit/distributed/test_rpc_calls.py::test_a_wire_type_that_rounds_nothing_is_noted_once",
        "tests/unit/distributed/test_timeouts.py",
        "tests/unit/online/test_c_client.py",
        "tests/unit/online/test_c_subscriber.py",
        "tests/unit/online/test_coordinator.py",
        "tests/unit/online/test_coordinator_protocol.py",
        "tests/unit/online/test_process_runner.py",
        "tests/unit/online/test_receiver.py",
        "tests/unit/online/test_security.py",
        "tests/unit/online/test_tracker.py::test_received_and_lost_are_what_was_sent_whenever_trainers_die",
        "tests/unit/online/test_trainer_replacement.py",
        "tests/unit/online/test_validator.py::test_mutated_messages_of_groups_never_raise",
        "tests/unit/online/test_validator.py::test_of_a_hundred_thousand_messages_each_is_validated_correctly",
        "tests/unit/server/test_bucket_updates.py::test_every_bit_is_that_of_a_step_over_whole_tensors",
        "tests/unit/optim/test_parallel_step.py::test_every_optimizer_makes_the_same_step",
        "tests/unit/optim/test_skipping.py::test_the_scale_is_that_of_torch",
        "tests/unit/parameters/test_sharding.py::test_every_element_has_one_owner_and_shares_are_even",
        "tests/unit/parameters/test_sharding.py::test_optimizers_over_parts_are_the_optimizer_over_all",
        "tests/unit/runs/test_attempt.py",
        "tests/unit/runs/test_reshard.py::test_every_pass_serves_every_sample_once_for_any_numbers_of_trainers",
        "tests/unit/runtime/test_fork_server.py",
        "tests/unit/runtime/test_rank_guard.py",
        "tests/unit/runtime/test_spares.py",
        "tests/unit/server/test_shared_optimizer_import.py",
        "tests/unit/sources/test_loader.py",
        "tests/unit/sources/test_sampler.py::test_a_sampler_without_end_is_refused",
        "tests/unit/sources/test_sampler.py::test_each_pass_is_dealt_once_and_in_turn",
        "tests/unit/sources/test_sampler.py::test_what_is_left_is_dealt_once_to_another_number_of_trainers",
        "tests/unit/sources/test_sources.py::test_the_order_is_that_of_the_distributed_sampler",
        "tests/unit/sources/test_stream.py",
        "tests/unit/test_client.py",
        "tests/unit/test_context.py::test_a_signal_is_acknowledged_while_the_main_thread_computes_in_c",
        "tests/unit/test_context.py::test_a_signal_that_interrupts_a_wait_for_it_does_not_deadlock",
        "tests/unit/test_process_utils.py",
        "tests/unit/test_run_simulation.py",
        "tests/unit/tools/bench/test_simulation.py",
        "tests/unit/tools/bench/test_prediction.py::test_failures_and_stragglers_are_simulated",
        "tests/unit/tools/bench/test_prediction.py::test_the_command_prints_a_row_for_each_case",
        "tests/unit/tools/bench/test_prediction.py::test_the_servers_to_break_even_are_those_of_the_formula",
        "tests/unit/tools/bench/test_prediction.py::test_what_two_trainers_show_predicts_more",
        "tests/unit/tools/report/test_from_runs.py",
        "tests/unit/tools/report/test_page.py",
        "tests/unit/tools/report/test_statistics.py",
        "tests/unit/trainers/test_data.py::test_a_resumed_run_loses_a_process",
        "tests/unit/trainers/test_data.py::test_each_sample_is_applied_as_often_as_is_due_over_hundreds_of_losses",
        "tests/unit/transport/test_segments.py",
    }
)
"""Files, and tests as ``file::function``, of these folders that are not fast."""


LONGEST = (
    "tests/integration/test_tables.py",
    "tests/integration/test_rounds.py",
    "tests/integration/test_several_servers.py",
    "tests/integration/test_lightning.py",
    "tests/integration/test_elastic.py",
    "tests/integration/test_hosts.py",
    "tests/integration/test_free_running.py",
    "tests/integration/test_ray.py",
    "tests/integration/test_mode_equivalence.py",
    "tests/integration/test_benchmark.py",
    "tests/integration/test_sample_versions.py",
    "tests/integration/test_module_buffers.py",
    "tests/integration/test_any_optimizer.py",
    "tests/integration/test_iterable_workers.py",
    "tests/integration/test_loader_workers.py",
    "tests/integration/test_portable.py",
    "tests/integration/test_colocate.py",
    "tests/integration/test_several_optimizers.py",
    "tests/integration/test_slurm.py",
    "tests/integration/test_online.py",
    "tests/integration/test_token.py",
    "tests/integration/test_launch.py",
    "tests/integration/test_publish.py",
    "tests/integration/test_data_loader.py",
    "tests/integration/test_chaos.py",
    "tests/integration/test_ddp_faults.py",
    "tests/simulation/test_simulation.py",
    "tests/laws/test_site.py",
)
"""Files with the most CPU time, the longest first. They begin first, so that no worker ends long after the others."""


@cache
def place_of(path: Path) -> str:
    """Return a file as it is named in ``FOLDERS`` and ``SLOW``."""
    return path.resolve().relative_to(ROOT).as_posix() if path.resolve().is_relative_to(ROOT) else ""


def may_be_fast(path: Path) -> bool:
    """Return whether a file has fast tests, or a folder may have files with some."""
    place = place_of(path)
    if path.is_dir():
        return any(place.startswith(folder) or folder.startswith(place) for folder in FOLDERS)
    return place.startswith(FOLDERS) and place not in SLOW


def is_fast(item: pytest.Item) -> bool:
    """Return whether a test is one of the fast ones."""
    name = f"{place_of(item.path)}::{item.name.partition('[')[0]}"
    return may_be_fast(item.path) and name not in SLOW and item.get_closest_marker("processes") is None


def sample(items: Sequence[pytest.Item], only_fast: bool = False) -> set[pytest.Item]:
    """Return the tests that run in each session, which are not all cases of a test that takes seconds for each.

    A test that is marked ``nightly`` is left out: it takes many seconds and shows with other processes what shorter
    ones show. Of a test that is marked ``sampled(every)`` one of so many cases is run. Of any other test that starts
    processes it is one case, or two if there are eight or more, and with ``only_fast`` two of every test. Its name
    chooses them: of three modes, say, another one in another test.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(f"{place_of(item.path)}::{item.name.partition('[')[0]}", []).append(item)
    chosen: set[pytest.Item] = set()
    for test, own in cases.items():
        if own[0].get_closest_marker("nightly"):
            continue
        if mark := own[0].get_closest_marker("sampled"):
            chosen.update(own[:: mark.args[0]])
            continue
        # Cases may be marked one by one: those of one process are all run.
        drawn = own if only_fast else [item for item in own if item.get_closest_marker("processes")]
        chosen.update(item for item in own if item not in drawn)
        if drawn:
            count = 2 if only_fast or len(drawn) > 7 else 1
            first = zlib.crc32(test.encode())
            chosen.update(drawn[(first + turn * len(drawn) // count) % len(drawn)] for turn in range(count))
    return chosen


def order(items: list[pytest.Item]) -> None:
    """Sort the tests by their files: the longest files first, then other runs, then what runs in one process."""

    def turn_of(item: pytest.Item) -> int:
        place = place_of(item.path)
        return LONGEST.index(place) if place in LONGEST else len(LONGEST) + place.startswith(FOLDERS)

    items.sort(key=turn_of)


def cpu_time() -> float:
    """Return the CPU time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])


class CpuTime:
    """Prints what the fast tests of a session took, and the slowest of them: candidates for ``SLOW``.

    A machine that is busy takes longer, so this fails no session.
    """

    def __init__(self) -> None:
        self.total_s, self.slowest, self.tests = 0.0, [], 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == "fast_cpu_s":
                self.tests += 1
                self.total_s += value
                self.slowest = sorted([*self.slowest, (value, report.nodeid)], reverse=True)[:5]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.tests and terminalreporter.config.option.markexpr == "fast":
            terminalreporter.line(f"{self.tests} fast tests took {self.total_s:.1f} s of CPU time; the slowest:")
            for seconds, name in self.slowest:
                terminalreporter.line(f"{seconds:.1f} s {name}")
