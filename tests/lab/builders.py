"""Constructed rows, measurements and records."""

from fusewise.lab.record import Measurement, Record, Row

KEY = {"op": "rope", "case": "cube-8", "dtype": "fp32", "pass_": "fwd"}


def row(provider, status="ok", **fields):
    defaults = {"shape": "q[8,8,8,8]", "bytes_min": 8_000_000, "flops_min": 100, "run": "r1", "device": "test"}
    if status == "ok":
        defaults |= {"error": 1e-7, "error_eager": 1e-7}
    else:
        defaults |= {"reason": "because"}
    return Row(**{**KEY, **defaults, "provider": provider, "status": status, **fields})


def measurement(provider, rounds, **fields):
    """`rounds`: device times, one list of samples a round."""
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
