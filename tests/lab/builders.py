"""Builds rows, measurements and records for tests."""

from fusewise.lab import analysis
from fusewise.lab.record import Measurement, Record, Row

KEY = {"op": "rope", "case": "cube-8", "dtype": "fp32", "pass_": "fwd"}
#: What `fusewise limits` found on a machine that copies 8 MB in 8 µs.
LIMITS = {
    "device": "test", "created": "2026-01-01T00:00:00+00:00", "copy_gb_s": 1000.0, "triad_gb_s": 900.0,
    "launch_us": 2.0, "matmul_tflop_s": {"fp32": 1.0}, "clocks": None, "versions": {"torch": "2"},
}  # fmt: skip


def row(provider, status="ok", **fields):
    defaults = {"shape": "q[8,8,8,8]", "bytes_min": 8_000_000, "flops_min": 100, "run": "r1", "device": "test"}
    if status == "ok":
        defaults |= {"error": 1e-7, "error_eager": 1e-7}
    else:
        defaults |= {"reason": "because"}
    return Row(**{**KEY, **defaults, "provider": provider, "status": status, **fields})


def measurement(provider, rounds, **fields):
    """`rounds`: device times, one list of samples per round."""
    turns = [{"round": i, "device_us": list(samples), "host_us": None} for i, samples in enumerate(rounds)]
    return Measurement(**{**KEY, "provider": provider, "prepared": {"status": "ok"}, "rounds": turns, **fields})


def study_record(rows, measurements=(), comparisons=(), **fields):
    defaults = {
        "run": "r1",
        "created": "2026-01-01T00:00:00+00:00",
        "request": {"op": "rope", "title": "rope-cube", "cache": "cold", "seed": 0},
        "environment": {
            "device": "cpu",
            "device_name": "a | <b>CPU</b>",
            "cpu": "x",
            "python": "3.11",
            "cache_bytes": 2**20,
            "cores": 2,
            "load_average": 0.1,
            "versions": {"torch": "2.13.0"},
        },
        "finished": True,
        "seconds": 1.5,
    }
    return Record(**{**defaults, "rows": list(rows), "measurements": list(measurements), **fields,
                     "comparisons": list(comparisons)})  # fmt: skip


HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">'\"`${1}&amp;"


def full_record(cases=3, hostile=""):
    """A record with everything a report can show: floors, a wrong and a missing provider, ledgers, code, limits."""
    rows, measurements, comparisons, ledgers = [], [], [], []
    factors = {"floor-copy": 1.0, "floor-launch": 0.2, "eager": 5.1, "torchscript": 5.0, "torch.compile": 1.9,
               "thunder": 2.5, "jax": 2.2, "tvm": 6.0, "liger": 1.3, "fusewise-cpu": 1.1, "fusewise-cpu#2": 1.1}  # fmt: skip
    for n in range(cases):
        for pass_ in ("fwd", "bwd"):
            key = {"case": f"cube{hostile}-{2**n}", "pass_": pass_}
            place = {"op": "rope", "case": key["case"], "dtype": "fp32", "pass": pass_}
            sizes = {"bytes_min": 8_000_000 * 2**n, "flops_min": 3_000_000 * 2**n}
            some = [
                measurement(name, [[f * 10 * 2**n * (1 + i / 500)] * 4 for i in range(6)], **key)
                for name, f in factors.items()
            ]
            group = [row(f"{name}{hostile}" if name == "liger" else name, **key, **sizes, peak_bytes=4_000_000 * 2**n)
                     for name in factors if not name.endswith("#2")]  # fmt: skip
            some[list(factors).index("liger")].provider += hostile
            group.append(row(f"unsloth{hostile}", "missing", **key, reason=f"no unsloth {hostile}"))
            group.append(row("bad", "wrong", **key, error=0.5, reason=f"error 0.5 {hostile}"))
            group, compared = analysis.group_rows(group, some)
            rows, measurements, comparisons = rows + group, measurements + some, comparisons + compared
            for name, count in (("eager", 5), ("torch.compile", 2), ("fusewise-cpu", 1)):
                kernels = [
                    {"name": f"kernel_{i}{hostile}", "read": 4_000_000 * 2**n, "written": 4_000_000 * 2**n}
                    for i in range(count)
                ]
                ledgers.append({**place, "provider": name, "kernels": kernels})
    source = [f"line_{i} = {i}{hostile}" for i in range(1, 41)]
    code = [
        {"provider": "torch.compile", "stage": "triton", "order": 1, "language": "python", "text": "\n".join(f"tl_{i} {hostile}" for i in range(1, 81)),
         "lines": {str(i): f"f.py:{(i + 1) // 2}" for i in range(1, 81)}, "counts": {"registers": 40}},
        {"provider": "torch.compile", "stage": f"source{hostile}", "order": 0, "language": "python", "text": "\n".join(source),
         "lines": {str(i): f"f.py:{i}" for i in range(1, 41)}, "counts": {}},
        {"provider": "jax", "stage": "hlo", "order": 0, "language": "hlo", "text": "HloModule m\n" * 30},
    ]  # fmt: skip
    limits = {"device": "test", "created": "2026-01-01", "copy_gb_s": 800.0, "triad_gb_s": 750.0, "launch_us": 2.0,
              "matmul_tflop_s": {"fp32": 0.5, "bf16": None}, "clocks": None, "versions": {}}  # fmt: skip
    return study_record(rows, measurements, comparisons, ledgers=ledgers, code=code, limits=limits)


#: Device and host microseconds of a decode step and of a long chunk, for a compiled call and two kernels.
SERVED = {
    "decode": {"eager": (30.0, 90.0), "torch.compile": (5.0, 48.0), "vllm": (4.0, 6.0), "fusewise-cuda": (3.5, 5.0)},
    "chunk": {
        "eager": (500.0, 95.0),
        "torch.compile": (91.0, 49.0),
        "vllm": (180.0, 6.5),
        "fusewise-cuda": (84.0, 5.5),
    },
}


def gpu_record(hostile=""):
    """A record with host times, profiles and time spent by activity."""
    rows, profiles = [], []
    for case, times in SERVED.items():
        rows += [row(f"{name}{hostile}" if name == "vllm" else name, case=case, device_us=device, host_us=host)
                 for name, (device, host) in times.items()]  # fmt: skip
        rows.append(row("floor-launch", case=case, device_us=2.0, host_us=1.0))
    for name in ("torch.compile", "fusewise-cuda"):
        lines = [
            {"name": f"kernel of {name}{hostile}", "self_cpu_percent": 25.0, "self_cpu_us": 10.0, "cpu_total_percent": 100.0,
             "cpu_total_us": 40.0, "cpu_avg_us": 4.0, "calls": 10, "self_device_us": 50.0, "self_device_percent": 100.0,
             "device_total_us": 50.0, "device_avg_us": 5.0},
        ]  # fmt: skip
        profiles.append({"op": "rope", "case": "decode", "dtype": "fp32", "pass": "fwd", "provider": name, "calls": 10,
                         "rows": lines})  # fmt: skip
    profiles.append({**profiles[0], "provider": "jax", "rows": []})
    spent = {
        "starting": 5.0,
        "inputs": 1.0,
        "truth": 3.0,
        "compiling": 40.0,
        "measuring": 45.0,
        "code": 5.0,
        "rest": 1.0,
    }
    return study_record(rows, profiles=profiles, spent=spent, seconds=100.0)
