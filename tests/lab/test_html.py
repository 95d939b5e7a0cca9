"""The HTML report as text: complete, self-contained, and safe whatever the record contains."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from builders import HOSTILE, full_record, measurement, row, study_record

from fusewise.lab import record
from fusewise.lab.ledger import Kernel, Ledger
from fusewise.lab.render import html, markdown, script

VOID = {"meta", "link", "input", "br", "img"}


class Page(HTMLParser):
    """Collects elements, attributes, ids and text; fails on elements that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.open, self.text = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.ids += [v for k, v in attributes if k == "id"]
        self.links += [v for k, v in attributes if k in ("href", "src", "xlink:href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def plain():
    text = html.report(full_record())
    return text, Page(text)


@pytest.fixture(scope="module")
def hostile():
    text = html.report(full_record(hostile=HOSTILE))
    return text, Page(text)


def test_everything_is_there(plain):
    text, page = plain
    for part in ("verdict", "charts", "glance", "cases", "rows", "code", "where", "help"):
        assert part in page.ids
    said = " ".join("".join(page.text).split())
    assert "A hand-written kernel is worth it in 6 (6 fusewise-cpu)." in said
    assert "moves 5.00 times the bytes, in 5 kernels" in said
    assert "cut short" not in said
    for title in (
        "Time, fp32 fwd",
        "Share of the limit, fp32 fwd",
        "Bandwidth over size, fp32 bwd",
        "Roofline, fp32 fwd",
        "Memory",
        "Memory traffic",
    ):
        assert f'aria-label="{title}"' in text
    assert "copy 796 GB/s" in text
    assert 'role="img"' not in text  # charts have links, which an image hides from screen readers
    assert "matmul 0.500 TFLOP/s" in text


def test_lines_join_the_cases_of_a_sweep_and_no_others(plain):
    assert "<polyline" in plain[0]
    others = [
        row("eager", case=case, device_us=9.0, bytes_min=size) for case, size in (("decode", 10**4), ("train", 10**8))
    ]
    text = html.report(study_record(others))
    assert "Bandwidth over size" in text
    assert "<polyline" not in text


def test_every_number_leads_to_a_row_that_is_there(plain):
    text, page = plain
    made = full_record()
    rows = [i for i in page.ids if i.startswith("row-")]
    assert len(rows) == len(made.rows) == len(set(rows))
    assert all(link[1:] in page.ids for link in page.links if link.startswith("#"))
    wanted = made.rows[7]
    assert re.search(rf'id="row-7".*?<code>{re.escape(wanted.id)}</code>', text, re.DOTALL)
    assert len(page.ids) == len(set(page.ids))


def test_nothing_is_loaded_and_only_our_own_script_may_run(plain):
    text, page = plain
    assert {link for link in page.links if not link.startswith("#")} == {"data:,"}
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert not [a for _, a in page.tags if any(k == "style" or k.startswith("on") for k in a)]


def test_hostile_names_stay_text(plain, hostile):
    text, page = hostile
    assert [t for t, _ in page.tags] == [t for t, _ in plain[1].tags]
    assert sorted(set(page.ids)) == sorted(set(plain[1].ids))
    assert "<script>document" not in text
    assert "<img" not in text
    assert HOSTILE in "".join(page.text)


def test_a_name_does_not_turn_the_text_behind_it_around():
    turning = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # Bidi_Control
    made = full_record(hostile=turning)
    made.request["title"] = made.environment["device_name"] = turning
    page = html.report(made)
    assert not set(turning) & set(page)
    assert f"<h1>{12 * chr(0xFFFD)} <small>" in page


def test_a_scheme_in_a_name_becomes_no_link():
    made = study_record([row("javascript:alert(1)", device_us=1.0), row("eager", device_us=2.0, case="javascript:x")])
    page = Page(html.report(made))
    assert all(link.startswith(("#row-", "#case-", "data:,")) or link[1:] in page.ids for link in page.links)
    assert "javascript:alert(1)" in "".join(page.text)


def test_data_inside_the_script_element_cannot_end_it(hostile):
    data = {"</script>": ["<!--", "\u2028", "&lt;", '"', "]]>"]}
    text = str(html.embedded(data))
    assert json.loads(text) == data
    assert not set("<>&\u2028") & set(text)


def test_a_record_of_little_renders():
    nothing = html.report(study_record([row("liger", "missing")]))
    assert "No provider has a time." in nothing
    assert "Providers without a time" in nothing and '<td class="reason">because</td>' in nothing
    assert "Nothing was measured" in html.report(study_record([], finished=False, seconds=None))


def test_a_typical_report_is_far_below_five_megabytes():
    assert len(html.report(full_record(cases=10)).encode()) < 2_000_000


def test_a_row_prints_itself_as_a_program_that_measures_it_again(tmp_path):
    made = study_record([row("eager", case="cube-4", device_us=3.0)])
    made.request |= {"rounds": [3, 3], "cache": "warm"}
    program = tmp_path / "again.py"
    program.write_text(script.program(made, made.rows[0]))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, timeout=120)
    assert "'status': 'ok'" in done.stdout
    assert "us per call here; the record has 3.0 on test" in done.stdout
    made.rows[0] = row("eager", case="no such case", device_us=3.0)
    program.write_text(script.program(made, made.rows[0]))
    assert subprocess.run([sys.executable, program], capture_output=True, check=False, timeout=120).returncode == 1


def test_a_hostile_row_is_only_literals_in_its_program():
    import ast

    nasty = "'''\"\"\"\n__import__('os').system('touch owned') #{x}" + HOSTILE
    made = study_record([row(nasty, case=nasty, device=nasty, device_us=1.0)])
    tree = ast.parse(script.program(made, made.rows[0]))
    values = {n.targets[0].id: ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign)}
    assert values["PROVIDER"] == nasty
    assert values["TASK"]["case"] == nasty
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "__import__"]


def test_an_old_record_renders(tmp_path):
    old = full_record().to_json()
    for name in ("code", "ledgers", "limits", "resumed"):
        del old[name]
    old["schema"] = 1
    (tmp_path / "record.json").write_text(json.dumps(old))
    assert "cube-4" in html.report(record.read(tmp_path))


def test_a_row_has_a_cell_in_each_column_and_its_number_to_sort_by():
    times = {"device_us": 10.0, "device_us_iqr": 0.25, "host_us": 6.0, "kernel_us": 9.0, "graph_us": 9.5}
    first = {"first_call_s": 3.0, "first_call_again_s": 1.5, "peak_bytes": 2048, "held_bytes": 1024}
    judged = {"limit": "copy", "share_of_limit": 0.8, "verdict_vs_best_other": "faster"}
    whole = row("liger", **times, **first, **judged, error=1.5e-7, error_eager=2.5e-7)
    made = study_record([row("eager", device_us=20.0, first_call_s=1.0), whole])
    assert html._line(made, whole, "row-1", [{"device_us": [1.0, 2.0]}, {"device_us": [3.0]}])["cells"] == [
        *((text, None) for text in ("cube-8", "fp32", "fwd", "liger", "ok")), ("10.0", 10.0), ("0.250", 0.25),
        ("80 %", 0.8), ("copy", None), ("800", 800.0), ("faster", None), ("1.50e-07", 1.5e-7), ("2.50e-07", 2.5e-7),
        ("6.00", 6.0), ("9.00", 9.0), ("9.50", 9.5), ("3.00", 3.0), ("1.50", 1.5), ("200,001", 200_001.0),
        ("50,001", 50_001.0), ("2.00 KiB", 2048.0), ("1.00 KiB", 1024.0),
    ]  # fmt: skip
    bare = html._line(made, row("jax", "missing", bytes_min=None), "row-2", [])["cells"]
    assert bare[5:] == [("–", None)] * 17
    names = [column.name for column in html.ROW_COLUMNS]
    floors = [row(f"floor-{kind}", device_us=8.0, limit="copy", share_of_limit=1.0) for kind in ("copy", "matmul")]
    slow = row("thunder", device_us=30.0, first_call_s=4.0)
    found = [dict(zip(names, html._line(made, one, "", [])["cells"], strict=True)) for one in (*floors, slow)]
    assert [line["of limit"] for line in found] == [("100 %", 1.0), ("–", None), ("–", None)]
    assert [line["even after"] for line in found] == [("–", None), ("–", None), ("never", html.NEVER)]


def test_a_glance_has_the_fastest_of_each_case_that_is_no_floor():
    rows = [row("floor-copy", device_us=5.0), row("eager", device_us=20.0), row("liger", device_us=10.0)]
    rows += [row("eager", "wrong", case="b"), row("liger", device_us=12.0, case="b")]
    (table,) = html._glances(study_record(rows), {r.id: r.id for r in rows})
    assert (table["title"], table["names"]) == ("fp32 fwd", ["floor-copy", "eager", "liger"])
    assert [[cell["text"] for cell in line["cells"]] for line in table["lines"]] == [
        ["5.00", "20.0", "10.0"], ["–", "wrong", "12.0"],
    ]  # fmt: skip
    assert [[cell["best"] for cell in line["cells"]] for line in table["lines"]] == 2 * [[False, False, True]]


def test_a_providers_traffic_is_the_sum_of_its_kernels():
    kernels = (Kernel(name="a", read=3, written=5), Kernel(name="b", read=2, written=10))
    found = Ledger(op="rope", case="a", dtype="fp32", pass_="fwd", provider="jax", kernels=kernels, bytes_min=8)
    assert html._sum(found) == {
        "provider": "jax", "kernels": 2, "read": 5, "written": 15, "bytes": 20, "excess": 2.5,
    }  # fmt: skip


def test_facts_of_the_run_and_of_the_machine():
    made = full_record()
    made.resumed, made.request["title"] = ["2026-01-02", "2026-01-03"], "é"
    facts = dict(html._facts(made))
    assert {
        "run": "r1", "finished": "yes", "resumed": "2026-01-02, 2026-01-03", "seconds": "1.50", "cores": "2",
        "cache bytes": "1.00 MiB", "torch": "2.13.0", "limits measured": "2026-01-01", "copy GB/s": "800",
        "triad GB/s": "750", "matmul TFLOP/s": "fp32 0.500, bf16 –", "launch µs": "2.00",
    }.items() <= facts.items()  # fmt: skip
    assert "&#34;title&#34;: &#34;é&#34;" in html.report(made)
    made.limits, made.finished = {**made.limits, "matmul_tflop_s": {}}, False
    facts = dict(html._facts(made))
    assert (facts["matmul TFLOP/s"], facts["finished"]) == ("–", "no: cut short")


def test_operations_are_unknown_in_the_case_that_has_them():
    prepared = {"flops_unknown": ["aten.sort"]}
    measured = [measurement("eager", [[9.0]], case=case, prepared=of) for case, of in (("a", {}), ("b", prepared))]
    text = html.report(
        study_record([row("eager", case=m.case, flops_min=None, device_us=9.0) for m in measured], measured)
    )
    before, behind = text.split('<details id="case-row-1"')
    said = "minimum traffic 7.63 MiB, an unknown number of operations (aten.sort)."
    assert said in behind and "minimum traffic 7.63 MiB." in before


def test_a_stage_says_what_tells_it_from_others_and_where_its_lines_come_from():
    stage = {"provider": "jax", "stage": "hlo", "order": 1, "language": "hlo", "text": "x", "case": "a"}
    lines = {"10": "f.py:2", "1": "f.py:1", "2": "f.py:1", "4": "f.py:1", "3": "f.py:1", "6": "f.py:1"}
    code = [
        stage | {"lines": lines, "counts": {"registers": 4}},
        stage | {"order": 0, "part": "1", "lines": {"1": "f.py:2"}},
    ]
    assert [found["name"] for found in html._stages(code)] == ["jax · hlo (1)", "jax · hlo"]
    assert [found["name"] for found in html._stages([stage, stage | {"case": "b"}])] == [
        "jax · hlo (a)",
        "jax · hlo (b)",
    ]
    assert html._code(code) == {
        "places": ["f.py:2", "f.py:1"],
        "stages": [
            {"runs": [[1, 1, 0]], "counts": {}},
            {"runs": [[1, 4, 1], [6, 1, 1], [10, 1, 0]], "counts": {"registers": 4}},
        ],
    }


def test_what_a_compilation_costs_and_when_it_has_paid_off():
    compiled = row("torch.compile", device_us=10.0, first_call_s=3.0, first_call_again_s=1.5, graph_us=9.5)
    rows = [row("eager", device_us=20.0, first_call_s=1.0), compiled, row("thunder", device_us=30.0, first_call_s=4.0)]
    made = study_record(rows)
    names = [column.name for column in html.ROW_COLUMNS]
    asked = ("graph µs", "first call s", "again s", "even after", "again even after")
    lines = [dict(zip(names, html._line(made, one, "row-0", [])["cells"], strict=True)) for one in rows]
    assert [[line[name][0] for name in asked] for line in lines] == [
        ["–", "1.00", "–", "–", "–"],
        ["9.50", "3.00", "1.50", "200,001", "50,001"],
        ["–", "4.00", "–", "never", "–"],
    ]
    said = markdown.report(made)
    assert "| 9.50 | 3.00 | 1.50 | 200,001 (50,001) |" in said and "| – | 4.00 | – | never |" in said
