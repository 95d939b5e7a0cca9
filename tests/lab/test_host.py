"""Host time against device time: which one dominates a call, and the sentences about it, on constructed rows."""

import dataclasses

import pytest
from builders import HOSTILE, SERVED, gpu_record, row, study_record

from fusewise.lab.render import host, html, markdown


def test_the_longer_of_device_and_host_is_what_a_call_takes():
    decode, chunk = host.groups(gpu_record().rows)
    assert [line.provider for line in decode.lines] == ["fusewise-cuda", "vllm", "torch.compile", "eager"]
    assert [line.call_us for line in decode.lines] == [5.0, 6.0, 48.0, 90.0]
    assert {line.decided_by for line in decode.lines} == {"host"}
    assert {line.decided_by for line in chunk.lines} == {"device"}
    assert chunk.compiled.provider == "torch.compile" and chunk.written.provider == "fusewise-cuda"
    assert decode.cells(decode.lines[2]) == [
        ("torch.compile", None), ("5.00", 5.0), ("48.0", 48.0), ("48.0", 48.0), ("host", None), ("9.60", 9.6),
        ("1.43", pytest.approx(5 / 3.5)),
    ]  # fmt: skip
    assert (
        host.waits(decode) == "4 of 4 are limited by host overhead; the fastest call is that of fusewise-cuda, 5.00 µs."
    )
    assert (
        host.waits(chunk) == "0 of 4 are limited by host overhead; the fastest call is that of fusewise-cuda, 84.0 µs."
    )


def test_the_answer_is_in_the_numbers_of_the_groups():
    waiting, working, widest = host.answer(host.groups(gpu_record().rows))
    assert "In 1 of 2 comparisons torch.compile is limited by host overhead" in waiting
    assert "the device needs 5.00 µs, the call 48.0 µs" in waiting
    assert "takes 1.43 times" in waiting and "as a call 9.60 times" in waiting
    assert "In 1 it is limited by the device: torch.compile takes 1.08 times the device time of that kernel" in working
    (alone,) = host.answer(host.groups(r for r in gpu_record().rows if r.case == "chunk"))
    said = "In 1 of 1 comparisons torch.compile is limited by the device: torch.compile takes 1.08 times the device time of "
    assert alone.startswith(f"{said}the hand-written kernel with the fastest call")
    decode = [r for r in gpu_record().rows if r.case == "decode"]
    twice = [dataclasses.replace(r, case="twice", device_us=2 * r.device_us, host_us=2 * r.host_us) for r in decode]
    both, _ = host.answer(host.groups([*decode, *twice]))
    assert "In 2 of 2 comparisons" in both and "the device needs 5.00 to 10.0 µs, the call 48.0 to 96.0 µs" in both
    assert (
        "decode fp32 fwd: torch.compile 5.00 µs of device time and 48.0 of host time, fusewise-cuda 3.50 and 5.00."
        in widest
    )


def test_the_answer_of_several_groups_has_their_range_their_median_and_the_widest_gap():
    rows = []
    for case, compiled, kernel in (("a", (2.0, 40.0), 20.0), ("b", (3.0, 60.0), 10.0), ("c", (8.0, 60.0), 20.0)):
        rows.append(row("torch.compile", case=case, device_us=compiled[0], host_us=compiled[1]))
        rows.append(row("vllm", case=case, device_us=2.0, host_us=kernel))
    said, widest = host.answer(host.groups(rows))
    assert "the device needs 2.00 to 8.00 µs, the call 40.0 to 60.0 µs" in said
    assert "it takes 1.00 to 4.00 times the device time (median 1.50)" in said
    assert "as a call 2.00 to 6.00 times as long (median 3.00)" in said
    assert widest.startswith("The widest gap is b fp32 fwd")
    busy = [dataclasses.replace(r, device_us=100 * r.device_us) for r in rows]
    (said,) = host.answer(host.groups(busy))
    assert "1.00 to 4.00 times the device time" in said and said.endswith("(median 1.50).")
    (tie,) = host.groups([row("eager", device_us=3.0, host_us=3.0), row("bad", "failed", host_us=3.0)])
    assert [line.decided_by for line in tie.lines] == ["device"]


def test_rows_without_both_say_nothing():
    assert (
        host.groups([row("eager", device_us=3.0), row("bad", "wrong"), row("floor-launch", device_us=1.0, host_us=1.0)])
        == []
    )
    lonely = [row("eager", device_us=3.0, host_us=9.0), row("torch.compile", device_us=3.0, host_us=9.0)]
    assert host.answer(host.groups(lonely)) == []  # no hand-written kernel
    assert not host.shown(study_record([row("eager", device_us=3.0)]))
    seen = study_record([row("eager", device_us=3.0)], profiles=gpu_record().profiles)
    assert host.shown(seen) and host.lack(seen).endswith("fusewise study rope-cube")
    seen.request["title"] = ""
    assert host.lack(seen).endswith("fusewise study rope")
    assert host.lack(gpu_record()) == ""


def test_profiles_are_per_call_and_beside_each_other():
    ((name, beside),) = host.profiles(gpu_record())
    assert name == "decode fp32 fwd" and [p["provider"] for p in beside] == ["torch.compile", "fusewise-cuda", "jax"]
    (cells,) = host.profile_lines(beside[0])
    assert [text for text, _ in cells] == [
        "kernel of torch.compile",
        "1.00 µs (25 %)",
        "4.00 µs",
        "5.00 µs (100 %)",
        "1.00",
    ]
    assert [key for _, key in cells] == [None, 1.0, 4.0, 5.0, 1.0]  # "1,000 µs" sorts as a number
    on_cpu = {**beside[0], "rows": [{k: v for k, v in beside[0]["rows"][0].items() if "device" not in k}]}
    assert host.profile_lines(on_cpu)[0][3] == ("–", None)
    del beside[0]["rows"][0]["self_device_percent"]
    assert host.profile_lines(beside[0])[0][3] == ("5.00 µs (–)", 5.0)


def test_reports_have_the_section_and_where_the_time_went():
    made = gpu_record()
    page, plain = html.report(made), markdown.report(made)
    for text in (page, plain):
        assert "Host against device" in text and "10 % of it is the harness" in text
        assert "as a call 9.60 times" in text
        assert "torch.profiler recorded no operator and no kernel." in text
    assert page.count("<figcaption>") == 3 and 'href="#host"' in page
    without = html.report(study_record([row("eager", device_us=3.0)]))
    assert 'id="host"' not in without and "Where the time went" not in without


def test_hostile_names_in_profiles_are_escaped():
    page = html.report(gpu_record(HOSTILE))
    assert "<img src=x" not in page and "<script>document" not in page
    assert len(SERVED["decode"]) == 4
