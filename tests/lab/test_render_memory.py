from builders import measurement, row, study_record

from fusewise.lab.render import markdown, memory

PREDICTED = {"saved_ratio": 0.5, "predicted_peak_bytes": 2048, "peak_bytes": 3072, "predicted_held_bytes": 0}


def made():
    measurements = [
        measurement("eager", [[1.0]], prepared={"status": "ok", **PREDICTED, "held_bytes": 512}),
        measurement("eager#2", [[1.0]], prepared={"status": "ok", **PREDICTED, "held_bytes": 512}),
        measurement("floor-copy", [[1.0]], prepared={"status": "ok", "saved_ratio": 0.5}),
        measurement("jax", [[1.0]], prepared={"status": "ok", "predicted_peak_bytes": 1024, "peak_bytes": None}),
    ]
    return study_record([row("eager", device_us=1.0)], measurements)


def test_what_was_predicted_stands_beside_what_was_measured():
    assert memory.lines(made()) == [
        ["cube-8", "fp32", "fwd", "eager", "0.500", "2.00 KiB", "3.00 KiB (1.50 ×)", "0 B", "512 B"],
        ["cube-8", "fp32", "fwd", "jax", "–", "1.00 KiB", "–", "–", "–"],
    ]


def test_the_report_has_it_where_there_is_a_model_and_only_there():
    assert "## Memory, predicted and measured" in markdown.report(made())
    assert "## Memory" not in markdown.report(study_record([row("eager", device_us=1.0)]))
