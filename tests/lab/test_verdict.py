"""Constructed records with known answers: each rule of docs/report.md once, and where it must stay silent."""

import dataclasses

import pytest
from builders import LIMITS, measurement, row, study_record

from fusewise.lab import analysis
from fusewise.lab.verdict import Verdict, is_compiler, moved, sentences, summary, verdicts

PLACE = {"op": "rope", "case": "cube-8", "dtype": "fp32", "pass": "fwd"}


def record(times, pair="eager", noise=0.001, hosts=None, ledgers=(), limits=None, wrong=(), code=(), **fields):
    """One group with these device times; the pair's second is `noise` slower."""
    all_times = {**times, **({f"{pair}#2": times[pair] * (1 + noise)} if pair in times else {})}
    measurements = [measurement(name, [[time]] * 6) for name, time in all_times.items()]
    for m in measurements:
        for turn in m.rounds:
            turn["host_us"] = (hosts or {}).get(m.provider)
    rows = [row(name, **fields) for name in times] + [row(name, "wrong", error=1.0, **fields) for name in wrong]
    rows, comparisons = analysis.group_rows(rows, measurements, limits)
    return study_record(rows, measurements, comparisons, ledgers=list(ledgers), code=list(code), limits=limits)


def only(found) -> Verdict:
    (one,) = verdicts(found)
    return one


def ledger(provider, *kernels):
    return {**PLACE, "provider": provider, "kernels": [{"name": "k", "read": r, "written": w} for r, w in kernels]}


@pytest.mark.parametrize(
    ("floors", "bound", "minimum"),
    [
        ({"floor-copy": 10.0, "floor-launch": 2.0}, "memory", 10.0),
        ({"floor-copy": 10.0, "floor-matmul": 40.0}, "compute", 40.0),
        ({"floor-copy": 10.0, "floor-matmul": 12.0}, "memory", 12.0),  # few rows: the product waits for its weights
        ({"floor-copy": 10.0, "floor-matmul": 12.5}, "memory", 12.5),
        ({"floor-copy": 10.0, "floor-matmul": 13.0}, "compute", 13.0),
        ({"floor-copy": 1.0, "floor-matmul": 8.0}, "compute", 8.0),  # a launch takes no longer than the copy
        ({"floor-copy": 1.0, "floor-launch": 2.0}, "launch", 2.0),
        ({"floor-copy": 1.0, "floor-launch": 2.0, "floor-matmul": 1.0}, "launch", 2.0),
        ({"floor-copy": 3.9, "floor-launch": 2.0}, "launch", 3.9),  # of which it moves its bytes in 1.9
        ({"floor-copy": 4.0, "floor-launch": 2.0}, "memory", 4.0),
        ({"floor-copy": 3.0, "floor-launch": 2.0, "floor-matmul": 20.0}, "compute", 20.0),
        ({"floor-launch": 2.0}, "cannot tell", None),  # its bytes may take longer
        ({"floor-matmul": 20.0, "floor-launch": 2.0}, "cannot tell", None),
        ({"floor-copy": 9.9}, "cannot tell", 9.9),  # launching may take most of it
        ({"floor-copy": 10.0}, "memory", 10.0),
        ({}, "cannot tell", None),
    ],
)
def test_what_binds_and_the_least_time(floors, bound, minimum):
    found = only(record({**floors, "eager": 80.0}))
    assert found.bound == bound
    assert found.minimum_us == (None if minimum is None else pytest.approx(minimum))


@pytest.mark.parametrize(
    ("ours", "bound", "minimum"), [(2.0, "launch", 2.0), (3.9, "launch", 2.0), (4.0, "cannot tell", None)]
)
def test_a_floor_that_a_provider_beats_is_that_of_launching_if_anything_is(ours, bound, minimum):
    """A copy of a few megabytes by the driver may take twice as long as a kernel."""
    times = {"floor-copy": 7.0, "floor-launch": 2.0, "eager": 30.0, "fusewise-cuda": ours}
    found = only(record(times))
    assert (found.bound, found.minimum_us) == (bound, minimum)
    assert (found.worth, found.kernel) == ("yes", "fusewise-cuda")
    assert found.left == (None if minimum is None else pytest.approx(1 - 2 / 30))


def test_matmuls_that_a_provider_beats_are_no_launch():
    times = {"floor-copy": 3.0, "floor-launch": 2.0, "floor-matmul": 20.0, "eager": 30.0, "liger": 3.9}
    assert only(record(times)).bound == "cannot tell"


def test_a_launch_that_a_provider_beats_is_no_minimum():
    found = only(record({"floor-copy": 3.0, "floor-launch": 10.0, "eager": 5.0}))
    assert (found.bound, found.minimum_us, found.worth) == ("cannot tell", None, "cannot tell")


def test_a_provider_in_place_moves_less_and_disproves_no_floor():
    times = {"floor-copy": 100.0, "floor-launch": 2.0, "torch.compile": 104.0, "vllm": 60.0}
    made = record(times, pair="torch.compile")
    assert only(made).bound == "cannot tell"
    for m in made.measurements:
        m.prepared["in_place"] = m.provider == "vllm"
    found = only(made)
    assert (found.bound, found.minimum_us) == ("memory", pytest.approx(100.0))
    assert {gap.provider: gap.causes for gap in found.gaps}["vllm"] == (
        "works in place, which moves less than the minimum",
    )
    assert (found.worth, found.kernel) == ("yes", "vllm")


def test_a_launch_alone_is_no_minimum_where_bytes_have_to_move():
    found = only(record({"floor-launch": 2.0, "eager": 80.0}))
    assert (found.minimum_us, found.worth) == (None, "cannot tell")
    assert "add floor-copy" in found.why
    still = only(record({"floor-launch": 2.0, "eager": 80.0}, bytes_min=0))
    assert (still.bound, still.minimum_us, still.worth) == ("launch", 2.0, "no")


def test_a_short_copy_needs_the_time_of_a_launch():
    found = only(record({"floor-copy": 3.0, "eager": 80.0}))
    assert (found.bound, found.minimum_us, found.worth) == ("cannot tell", 3.0, "cannot tell")
    assert "add floor-launch" in found.why
    kept = only(record({"floor-copy": 3.0, "eager": 80.0}, limits=LIMITS))  # 2 µs to launch
    assert (kept.bound, kept.minimum_us, kept.worth) == ("launch", 3.0, "no")


def test_limits_of_the_machine_stand_in_for_floors_that_were_not_measured():
    memory = only(record({"eager": 80.0}, limits=LIMITS))  # 8 MB at 1000 GB/s
    assert (memory.bound, memory.minimum_us) == ("memory", pytest.approx(8.0))
    compute = only(record({"eager": 80.0, "floor-copy": 9.0}, limits=LIMITS, flops_min=20_000_000))
    assert (compute.bound, compute.minimum_us) == ("compute", pytest.approx(20.0))
    measured = only(record({"eager": 80.0, "floor-copy": 9.0}, limits=LIMITS))
    assert measured.minimum_us == pytest.approx(9.0)
    product = only(record({"eager": 80.0, "floor-matmul": 20.0}, limits=LIMITS))
    assert (product.bound, product.minimum_us) == ("compute", pytest.approx(20.0))
    short = only(record({"eager": 80.0}, limits={**LIMITS, "launch_us": None}))
    assert (short.bound, short.minimum_us) == ("memory", pytest.approx(8.0))  # of the bytes alone


@pytest.mark.parametrize(
    ("times", "limit", "bound", "worth", "minimum"),
    [
        ({"eager": 80.0}, "copy", "cannot tell", "cannot tell", None),
        ({"eager": 80.0, "fusewise-cpu": 40.0}, "copy", "cannot tell", "yes", None),
        ({"eager": 9.5}, "copy", "memory", "no", 9.0),  # nothing can be faster than its bytes
        ({"eager": 80.0}, "launch", "cannot tell", "cannot tell", None),
        ({"eager": 9.5}, "launch", "launch", "no", 9.0),
    ],
    ids=["slow", "beaten", "at the rate of a copy", "slower than a launch", "as fast as a launch"],
)
def test_unknown_operations_leave_open_what_the_bytes_do_not_settle(times, limit, bound, worth, minimum):
    prepared = {"status": "ok", "flops_unknown": ["aten._linalg_svd"]}
    floors = {"floor-copy": 8.5, "floor-launch": 2.0, f"floor-{limit}": 9.0}
    all_times = {**times, f"eager{analysis.TWIN}": times["eager"], **floors}
    samples = [measurement(name, [[t]] * 4, prepared=prepared) for name, t in all_times.items()]
    rows, comparisons = analysis.group_rows([row(name, flops_min=None) for name in times], samples, LIMITS)
    assert rows[0].limit == limit and rows[0].share_of_limit == pytest.approx(9 / times["eager"])
    found = only(study_record(rows, samples, comparisons, limits=LIMITS))
    assert (found.bound, found.worth) == (bound, worth)
    assert found.minimum_us == (None if minimum is None else pytest.approx(minimum))
    if worth == "no":
        launching = "it is launch-bound; fuse it with its neighbours"
        assert found.why == (launching if bound == "launch" else "eager is at 94.7 % of the limit")
    if worth == "cannot tell":
        assert found.why == (
            "the FLOPs of aten._linalg_svd are unknown: computing may take longer than moving the bytes, 9.00 µs"
        )


def test_a_kernel_of_ours_that_beats_the_best_compiler_is_worth_it_and_named():
    found = only(record({"floor-copy": 10.0, "eager": 90.0, "torch.compile": 20.0, "fusewise-cpu": 11.0}))
    assert (found.worth, found.kernel) == ("yes", "fusewise-cpu")
    assert found.why == "fusewise-cpu takes 0.550 [0.550, 0.550] of the time of torch.compile"
    assert found.left == pytest.approx(0.5)
    assert [gap.provider for gap in found.gaps] == ["fusewise-cpu", "torch.compile", "eager"]
    assert found.gaps[0].causes == ("at the limit",)


def test_a_faster_library_is_told_beside_ours():
    found = only(record({"floor-copy": 10.0, "eager": 90.0, "fusewise-cpu": 20.0, "liger": 12.0}))
    assert (found.worth, found.kernel) == ("yes", "fusewise-cpu")
    assert found.why.endswith(", liger 0.133")
    assert only(record({"floor-copy": 10.0, "eager": 90.0, "liger": 12.0})).kernel == "liger"


@pytest.mark.parametrize(
    ("times", "noise", "worth", "words"),
    [
        ({"floor-copy": 10.0, "eager": 10.5}, 0.001, "no", "eager is at 95.2 % of the limit"),
        ({"floor-copy": 10.0, "eager": 9.0}, 0.001, "no", "eager is at 111 % of the limit"),
        ({"floor-copy": 8.996, "eager": 10.0}, 0.001, "no", "eager is at 90 % of the limit"),
        ({"floor-copy": 10.0, "eager": 10.5, "liger": 9.8}, 0.001, "no", "eager is at 95.2 % of the limit"),
        ({"floor-copy": 10.0, "eager": 9.0, "liger": 6.0}, 0.5, "cannot tell", "liger is at 167 % of the floor"),
        ({"floor-copy": 10.0, "eager": 6.0}, 0.001, "cannot tell", "eager is at 167 % of the floor's speed"),
        ({"floor-copy": 9.0, "eager": 6.0}, 0.001, "no", "eager is at 150 % of the limit"),
        ({"floor-copy": 10.0, "eager": 20.0}, 0.001, "try", "no hand-written kernel was measured"),
        ({"floor-copy": 10.0, "eager": 20.0, "liger": 20.0}, 0.001, "try", "measured here is faster"),
        ({"floor-copy": 10.0, "eager": 20.0, "liger": 17.0}, 0.3, "cannot tell", "ambiguous; measure more rounds"),
        ({"floor-copy": 10.0, "eager": 20.0, "liger": 20.0, "vllm": 24.0}, 0.3, "cannot tell", "vllm against eager is"),
        ({"floor-copy": 10.0, "eager": 12.0}, 0.3, "cannot tell", "within the noise of this run, 30 %"),
        ({"floor-copy": 10.0, "floor-launch": 6.0, "eager": 20.0}, 0.001, "no", "it is launch-bound; fuse it with"),
        ({"floor-copy": 10.0, "liger": 20.0}, 0.001, "cannot tell", "no A/A pair"),
        ({"eager": 20.0}, 0.001, "cannot tell", "no limit is known"),
        ({"floor-copy": 10.0}, 0.001, "cannot tell", "no provider has a correct result and a time"),
    ],
)
def test_not_worth_it_worth_trying_or_not_to_be_told(times, noise, worth, words):
    found = only(record(times, noise=noise))
    assert (found.worth, words in found.why) == (worth, True), found.why
    assert found.kernel is None


@pytest.mark.parametrize(
    ("device", "fix"),
    [("cpu", "fuse it with its neighbours"), ("cuda:0", "fuse it with its neighbours or capture a CUDA graph")],
)
def test_what_starting_anything_binds_is_not_worth_it(device, fix):
    made = record({"floor-copy": 9.0, "floor-launch": 10.0, "eager": 90.0})
    made.environment["device"] = device
    found = only(made)
    assert (found.bound, found.worth, found.why) == ("launch", "no", f"it is launch-bound; {fix}")


def test_no_kernel_is_worth_it_where_nothing_takes_longer_than_starting_it():
    """One that is faster than the best compiler launches less, as a fused neighbourhood or a graph would."""
    found = only(record({"floor-copy": 9.0, "floor-launch": 10.0, "eager": 90.0, "liger": 12.0}))
    assert (found.bound, found.worth, found.kernel) == ("launch", "no", None)


def test_a_small_copy_that_mostly_launches_rules_out_no_kernel_that_was_measured_to_be_faster():
    found = only(record({"floor-copy": 10.0, "floor-launch": 6.0, "eager": 90.0, "liger": 12.0}))
    assert (found.bound, found.worth, found.kernel) == ("launch", "yes", "liger")


def test_a_floor_that_a_compiler_is_far_below_says_nothing():
    """It affects neither the bound nor a minimum time nor the distance of others."""
    judged = only(record({"floor-copy": 50.0, "eager": 20.0, "fusewise-cpu": 25.0}))
    assert (judged.bound, judged.minimum_us, judged.left, judged.worth) == ("cannot tell", None, None, "cannot tell")
    assert judged.why == "eager is at 250 % of the floor's speed, so the floor is not a limit"
    assert all(gap.factor is None for gap in judged.gaps)
    assert not any("at least" in sentence or "to gain" in sentence for sentence in sentences(judged))


@pytest.mark.parametrize(("eager", "liger", "minimum"), [(10.5, 9.0, 10.0), (10.5, 6.0, None), (6.0, 5.0, None)])
def test_a_kernel_that_is_faster_outweighs_the_limit(eager, liger, minimum):
    """A compiler at the rate of a copy is no reason against a kernel that was measured to be faster."""
    judged = only(record({"floor-copy": 10.0, "eager": eager, "liger": liger}))
    assert (judged.worth, judged.kernel, judged.minimum_us) == ("yes", "liger", minimum)
    assert judged.bound == ("memory" if minimum else "cannot tell")


def test_the_limit_is_known_even_if_no_provider_is_right():
    judged = only(record({"floor-copy": 10.0}, wrong=["eager"]))
    assert (judged.bound, judged.minimum_us, judged.worth) == ("memory", 10.0, "cannot tell")


def test_the_floor_to_add_is_one_that_the_case_has():
    """A function that moves no byte, such as a view, has nothing to copy."""
    found = record({"eager": 30.0})
    assert "add floor-copy to the providers" in only(found).why
    found.rows = [dataclasses.replace(r, bytes_min=0) for r in found.rows]
    assert "add floor-launch to the providers" in only(found).why


def test_products_without_a_time_are_not_called_memory_bound():
    found = record({"eager": 30.0})
    found.rows = [dataclasses.replace(r, flops_min=100 * r.bytes_min) for r in found.rows]
    judged = only(found)
    assert (judged.bound, judged.worth) == ("cannot tell", "cannot tell")
    assert judged.why == "no limit is known: its matmuls were not measured; run `fusewise limits --device cpu`"
    found = record({"floor-matmul": 10.0, "eager": 30.0})
    found.rows = [dataclasses.replace(r, flops_min=100 * r.bytes_min) for r in found.rows]
    assert "add floor-copy to the providers" in only(found).why
    found.environment["device"] = "cuda:0"
    assert only(found).why.endswith("run `fusewise limits`")


def test_without_a_compiler_nothing_is_said_of_a_kernel():
    found = only(record({"floor-copy": 10.0, "liger": 20.0}, pair="liger"))
    assert (found.worth, found.why) == (
        "cannot tell",
        "no compiler was measured; add eager or torch.compile to the providers",
    )


def test_a_wrong_provider_has_no_part_in_the_verdict():
    found = only(record({"floor-copy": 10.0, "eager": 30.0}, wrong=["fusewise-cpu"]))
    assert [gap.provider for gap in found.gaps] == ["eager"]
    assert found.worth == "try"


@pytest.mark.parametrize(
    ("times", "error", "worth"),
    [
        ({"eager": 30.0}, 2.9e-6, "cannot tell"),  # 10 × (2 × 1.17e-7 + 6e-8) = 2.94e-6
        ({"eager": 30.0}, 3.0e-6, "try"),
        ({"eager": 30.0}, None, "try"),  # not finite
        ({"eager": 30.0, "liger": 12.0}, 4.35e-7, "yes"),  # faster than the correct ones
        ({"eager": 30.0, "liger": 12.0}, 1e-3, "yes"),
        ({"eager": 11.0, "liger": 10.0}, 4.35e-7, "no"),  # whatever the other compiler takes
    ],
)
def test_a_compiler_that_is_wrong_by_little_is_missed(times, error, worth):
    found = record({"floor-copy": 10.0, **times})
    found.rows += [row(name, "wrong", error=error, error_eager=1.17e-7) for name in ("torch.compile", "bad")]
    judged = only(found)
    assert judged.worth == worth
    untimed = "not timed, since wrong by at most 10 times the allowed error: torch.compile"
    assert (untimed in judged.why) == (error is not None and error < 3e-6 and worth != "no")
    if worth == "cannot tell":
        assert judged.kernel is None
        assert judged.why == f"{untimed}; the best other compiler, eager, is at 33.3 % of the limit"


def test_a_dtype_without_a_known_precision_has_no_allowed_error():
    found = only(study_record([row("eager", "wrong", error=1e-9, error_eager=1e-9, dtype="fp8")]))
    assert (found.worth, found.why) == ("cannot tell", "no provider has a correct result and a time")


def test_causes_come_from_ledgers_hosts_clocks_and_counts():
    found = record(
        {"floor-copy": 10.0, "floor-launch": 2.0, "eager": 40.0, "torch.compile": 12.0, "jax": 30.0},
        hosts={"torch.compile": 48.0},
        ledgers=[ledger("eager", (8_000_000, 8_000_000), (8_000_000, 8_000_000)), ledger("torch.compile", (4_000_000, 4_000_000))],
        code=[{"provider": "jax", "stage": "sass", "order": 1, "language": "sass", "text": "", "counts": {"spill_loads": 1}}],
    )  # fmt: skip
    causes = {gap.provider: gap.causes for gap in only(found).gaps}
    assert causes["eager"] == ("moves 4.00 times the bytes, in 2 kernels",)
    assert causes["torch.compile"] == ("host overhead: a call takes 48.0 µs on the host, longer than on the device",)
    assert causes["jax"] == ("spills registers (sass)",)
    assert only(found).saved_bytes == 24_000_000
    assert moved(found.ledgers[0]) == 32_000_000
    assert moved(ledger("eager", (None, 5), (6, None))) == 11


def test_what_costs_nothing_is_no_cause():
    stage = {"provider": "eager", "stage": "sass", "order": 1, "language": "sass", "text": ""}
    found = record(
        {"floor-copy": 10.0, "eager": 40.0},
        hosts={"eager": 40.0},
        ledgers=[ledger("eager", *[(1_000_000, 1_000_000)] * 4)],  # and the time of a launch is unknown
        code=[
            {**stage, "counts": {"spill_bytes": 0, "registers": 40}},
            {**stage, "case": "cube-16", "counts": {"spill_bytes": 8}},
        ],
        device="NVIDIA X",
    )
    for m in found.measurements:
        m.prepared["in_place"] = True
    assert only(found).gaps[0].causes == ("cause unknown: its memory traffic is minimal",)
    assert only(record({"floor-copy": 4.0, "eager": 4.1})).gaps[0].causes == ("at the limit",)  # on a CPU, precise


def test_traffic_is_no_cause_where_the_least_is_unknown():
    found = record({"floor-launch": 2.0, "eager": 40.0}, ledgers=[ledger("eager", *[(9, 9)] * 4)], bytes_min=None)
    assert only(found).gaps[0].causes == ("cause unknown: no minimum of bytes",)


@pytest.mark.parametrize(("written", "times"), [(4_790_000, None), (4_810_000, "1.10 times")])
def test_a_tenth_more_bytes_than_needed_is_a_cause(written, times):
    found = only(
        record({"floor-copy": 10.0, "eager": 40.0}, ledgers=[ledger("eager", (4_000_000, written), (None, None))])
    )
    moves = (
        "cause unknown: its memory traffic is minimal" if times is None else f"moves {times} the bytes, in 2 kernels"
    )
    assert found.gaps[0].causes == (moves,)


@pytest.mark.parametrize(
    ("times", "ledgers", "causes"),
    [
        ({"floor-copy": 10.0, "eager": 11.1}, (), "at the limit"),
        ({"floor-copy": 10.0, "eager": 11.2}, (), "cause unknown: no traffic ledger"),
        ({"floor-launch": 2.0, "eager": 19.9}, [(1, 1)] * 2, "launches 2 kernels instead of one: 10.1 % of its time"),
        ({"floor-launch": 2.0, "eager": 20.1}, [(1, 1)] * 2, "cause unknown: its memory traffic is minimal"),
    ],
)
def test_where_a_cause_begins(times, ledgers, causes):
    found = record(times, ledgers=[ledger("eager", *ledgers)] if ledgers else ())
    assert only(found).gaps[0].causes == (causes,)


@pytest.mark.parametrize(("us", "causes"), [(4.9, "too short to measure precisely"), (5.1, "at the limit")])
def test_what_is_too_short_on_a_gpu(us, causes):
    assert only(record({"floor-copy": us, "eager": us}, device="NVIDIA X")).gaps[0].causes == (causes,)


@pytest.mark.parametrize(("us", "in_place"), [(9.0, True), (6.6655, False)])  # at 150 %, rounded, no floor is disproved
def test_who_works_in_place_but_moves_no_less_is_at_the_limit_and_so_is_who_does_not(us, in_place):
    found = record({"floor-copy": 10.0, "eager": us})
    for m in found.measurements:
        m.prepared["in_place"] = in_place
    assert only(found).gaps[0].causes == ("at the limit",)


def test_what_takes_less_than_the_minimum_leaves_nothing():
    found = record({"floor-copy": 10.0, "eager": 9.0}, ledgers=[ledger("eager", (3_000_000, 4_000_000))])
    assert (only(found).left, only(found).saved_bytes) == (0.0, 0)


def joined(first, second):
    """One record of both groups, the second's as another case."""
    rows, measured = ([dataclasses.replace(x, case="cube-16") for x in of] for of in (second.rows, second.measurements))
    compared = [{**c, "case": "cube-16"} for c in second.comparisons]
    ledgers = first.ledgers + [{**entry, "case": "cube-16"} for entry in second.ledgers]
    parts = first.rows + rows, first.measurements + measured, first.comparisons + compared
    return study_record(*parts, ledgers=ledgers)


def test_groups_are_judged_by_their_own_noise():
    judged = verdicts(joined(*(record({"floor-copy": 10.0, "eager": 20.0}, pair=pair) for pair in ("eager", "none"))))
    assert [v.worth for v in judged] == ["try", "cannot tell"] and "no A/A pair" in judged[1].why


def test_groups_are_judged_by_their_own_traffic_and_providers():
    whole, half = (
        record({"floor-copy": 10.0, "eager": 20.0, "liger": us}, ledgers=[ledger("eager", (moved, moved))])
        for us, moved in ((6.0, 8_000_000), (12.0, 4_000_000))
    )
    for m in whole.measurements:
        m.prepared |= {"in_place": m.provider == "liger", "flops_unknown": ["aten.sort"]}
    first, second = verdicts(joined(whole, half))
    assert (first.saved_bytes, second.saved_bytes) == (8_000_000, 0)
    assert [v.gaps[1].causes[0] for v in (first, second)] == [
        "moves 2.00 times the bytes, in 1 kernel", "cause unknown: its memory traffic is minimal",
    ]  # fmt: skip
    assert (first.bound, second.bound) == ("cannot tell", "memory")
    third = verdicts(joined(half, whole))[0]
    assert (third.bound, third.minimum_us) == ("memory", pytest.approx(10.0))


def test_compilers_are_those_and_their_variants():
    assert all(map(is_compiler, ("eager", "torch.compile", "torch.compile-graphs", "thunder-nvfuser")))
    assert not any(map(is_compiler, ("eagerly", "liger", "fusewise-cpu", "fusewise-triton")))


@pytest.mark.parametrize(
    ("kernels", "cause"),
    [
        ([], "cause unknown: its memory traffic is minimal"),
        ([(2048, 0), (0, 2048)], "moves 4.00 KiB, where no byte has to move, in 2 kernels"),
    ],
)
def test_traffic_where_no_byte_has_to_move(kernels, cause):
    found = record({"floor-launch": 2.0, "eager": 40.0}, ledgers=[ledger("eager", *kernels)], bytes_min=0)
    judged = only(found)
    assert judged.gaps[0].causes == (cause,)
    assert ("Fusion can save none of eager's memory traffic." in sentences(judged)) == (not kernels)


def test_at_the_limit_but_too_short():
    found = record({"floor-copy": 4.0, "eager": 4.1}, device="NVIDIA X")
    assert only(found).gaps[0].causes == ("too short to measure precisely",)


def test_many_launches_starved_queues_and_low_clocks_are_causes():
    found = record(
        {"floor-copy": 10.0, "floor-launch": 2.0, "eager": 40.0, "thunder": 50.0},
        ledgers=[ledger("eager", *[(800_000, 800_000)] * 5)],
    )
    for m in found.measurements:
        for turn in m.rounds:
            turn["held"] = m.provider != "eager" or turn["round"] > 0
    found.rows = [
        r if r.provider not in ("eager", "thunder") else type(r)(**{**r.__dict__, "clocks": {"sm_mhz": mhz}})
        for r, mhz in zip(found.rows, (0, 0, 1000, 1900), strict=True)
    ]
    causes = {gap.provider: gap.causes for gap in only(found).gaps}
    assert causes["eager"] == (
        "launches 5 kernels instead of one: 20 % of its time",
        "its time includes host overhead: too many launches to queue",
        "its clock was lower: 1,000 MHz",
    )
    assert causes["thunder"] == ("cause unknown: no traffic ledger",)


@pytest.mark.parametrize(
    ("busy", "worth"),
    [(("liger",), "yes"), (("liger", "eager"), "yes"), (("liger", "eager", "fusewise-cpu"), "cannot tell")],
)
def test_times_of_a_busy_machine_carry_no_verdict(busy, worth):
    """One provider with waiting threads may have too many of them; if most have, another process uses the cores."""
    found = record({"floor-copy": 10.0, "eager": 40.0, "torch.compile": 30.0, "liger": 20.0, "fusewise-cpu": 50.0})
    waiting = dict(zip(busy, (1.5, 0.7, 0.8), strict=False))
    found.rows = [dataclasses.replace(r, clocks={"waiting_threads": waiting.get(r.provider, 0.02)}) for r in found.rows]
    judged = only(found)
    assert judged.worth == worth
    if worth == "cannot tell":
        assert judged.why == "threads of most providers waited for a core; run it again on an idle machine"
    causes = {gap.provider: gap.causes for gap in judged.gaps}
    assert causes["liger"] == ("1.50 of its threads waited for a core, on average",)
    assert causes["torch.compile"] == ("cause unknown: no traffic ledger",)


def test_a_record_read_back_without_samples_gives_no_false_certainty():
    found = record({"floor-copy": 10.0, "eager": 90.0, "fusewise-cpu": 11.0})
    found.measurements = []
    assert only(found).worth == "cannot tell"


def test_sentences_say_it_all():
    found = record(
        {"floor-copy": 10.0, "eager": 90.0, "torch.compile": 20.0, "fusewise-cpu": 11.0},
        ledgers=[ledger("eager", (16_777_216, 8_000_000))],
    )
    assert sentences(only(found)) == [
        "It is memory-bound: moving its bytes takes longer than computing on them.",
        "The minimum is 10.0 µs.",
        "The fastest provider is fusewise-cpu: 11.0 µs, 1.10 times the minimum.",
        "Fusion can save up to 16.0 MiB of eager's memory traffic.",
        "The best compiler spends 50 % of its time above the minimum.",
        "A hand-written kernel is worth it: fusewise-cpu"
        " (fusewise-cpu takes 0.550 [0.550, 0.550] of the time of torch.compile).",
    ]
    assert summary(verdicts(found)) == [
        "Of 1 comparison: 1 memory-bound.",
        "A hand-written kernel is worth it in 1 (1 fusewise-cpu).",
    ]
    assert summary([]) == ["Nothing was measured, so there is no verdict."]


def test_sentences_say_only_what_is_known():
    lost, unlimited = only(record({}, wrong=["eager"])), only(record({"eager": 20.0}))
    unknown = "Whether a hand-written kernel is worth it is unknown"
    bound = "It is of unknown bound: the record has no floor and no limit of this machine that holds for it."
    assert sentences(lost) == [bound, f"{unknown} (no provider has a correct result and a time)."]
    assert sentences(unlimited) == [
        bound, "The fastest provider is eager: 20.0 µs.", f"{unknown} ({unlimited.why}).",
    ]  # fmt: skip
    assert summary([lost, unlimited]) == [
        "Of 2 comparisons: 2 of unknown bound.", f"{unknown} in 2 ({lost.why}; {unlimited.why}).",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reasons", "said"),
    [(1, "why 0"), (2, "why 0; why 1"), (3, "why 0; why 1; and 1 more"), (4, "why 0; why 1; and 2 more")],
)
def test_a_summary_of_more_reasons_than_it_has_says_how_many(reasons, said):
    tried = only(record({"floor-copy": 10.0, "eager": 20.0}))
    told = summary([dataclasses.replace(tried, why=f"why {i % reasons}") for i in range(8)])
    assert told[1] == f"A hand-written kernel may be worth trying in 8 ({said})."
