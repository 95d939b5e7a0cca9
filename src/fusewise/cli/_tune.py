"""The command that searches for the best kernel configurations. Only parses arguments and calls."""

from __future__ import annotations

import json

import click

from . import _completion
from ._options import names

EXIT_CODES = """\b
Exit codes:
  0    done; a candidate that is wrong or fails is reported and left out
  1    it could not run, or keep what it found (the message says why)
  2    the command line is wrong
  130  interrupted; the results so far are kept
"""


def _shapes(_: click.Context, __: click.Parameter, value: tuple[str, ...]) -> list[tuple[int, ...]]:
    try:
        return [tuple(int(number) for number in text.split(",")) for text in value]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not numbers with commas, as 4096,1024,4096") from None


@click.command(
    epilog="""\b
Examples:
  fusewise tune geglu --case llama-3-8b-train
  fusewise tune geglu --shape 16384,1024,4096 --epilogue y,preact
  fusewise tune geglu --preset geglu-models --time-limit 30 --json
  fusewise tune geglu --list
  TRITON_INTERPRET=1 fusewise tune geglu --shape 32,32,32 --epilogue y --device cpu

"""
    + EXIT_CODES
)
@click.argument("target", shell_complete=_completion.tuned)
@click.option(
    "--case", "cases", multiple=True, shell_complete=_completion.case,
    help="A case by name (`fusewise study geglu --list`); may be repeated.",
)  # fmt: skip
@click.option("--preset", shell_complete=_completion.preset, help="All cases of a preset.")
@click.option(
    "--shape", "shapes", multiple=True, callback=_shapes, metavar="M,D,F",
    help="Rows, features in, features out; may be repeated.",
)  # fmt: skip
@click.option("--dtype", "dtypes", callback=names, help="Comma-separated: fp32, bf16, fp16. Default: the case's own.")
@click.option(
    "--epilogue", "kernels", callback=names,
    help="Comma-separated kernels: y, preact, gate, gradient, down. Default: all of the case.",
)  # fmt: skip
@click.option("--impl", type=click.Choice(["gluon", "triton"]), help="Default: what a call uses here.")
@click.option("--device", help="cpu or cuda[:index]. Default: the GPU if there is one.")
@click.option(
    "--time-limit", type=click.FloatRange(min=0), default=120.0, show_default=True, help="Seconds per kernel and shape."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the order of candidates.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--list", "list_kept", is_flag=True, help="List the stored results for this device, search nothing.")
def tune(
    target: str,
    cases: tuple[str, ...],
    preset: str | None,
    shapes: list[tuple[int, ...]],
    dtypes: list[str] | None,
    kernels: list[str] | None,
    impl: str | None,
    device: str | None,
    time_limit: float,
    seed: int,
    as_json: bool,
    list_kept: bool,
) -> None:
    """Search for the fastest configurations of TARGET's kernels.

    Later calls use the stored results.

    TARGET is geglu. No call ever tunes: without a stored result a heuristic chooses, and with FUSEWISE_TUNED=0 it
    always does.
    """
    from fusewise.lab import plan
    from fusewise.lab import tune as tuning

    for option, given in (("dtype", dtypes), ("epilogue", kernels)):
        if given == []:
            raise click.UsageError(
                f"tune: {option} must be one name at least, got none; leave it out for the case's own"
            )
    try:
        where = plan.device(device, "tune")
        if list_kept:
            found = tuning.kept_results(tuning.target(target), where)
            click.echo(json.dumps(found) if as_json else "\n".join(tuning.kept_lines(found, where)))
            return
        jobs = tuning.jobs(target, cases, preset, shapes, dtypes or (), kernels or (), where, impl)
    except tuning.Unable as error:
        raise click.ClickException(str(error)) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    results = []
    try:
        for result in tuning.tune(jobs, time_limit, seed, lambda text: click.echo(text, err=True)):
            results.append(result.to_json())
            if not as_json:
                click.echo("\n".join(tuning.lines(result)))
    except (tuning.Unable, ValueError) as error:
        raise click.ClickException(str(error)) from None
    except RuntimeError as error:  # from the device: out of memory, or a kernel that crashed it
        raise click.ClickException(f"tune: the device must run the search, got {error}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"; {len(results)} results are kept") from None
    finally:  # also what was found before an error or an interruption
        if as_json:
            click.echo(json.dumps({"device": where, "results": results}))
        for file in dict.fromkeys(result["file"] for result in results):
            click.echo(f"stored in {file}", err=True)


VERBS = (tune,)
