"""The command line: only parses arguments and calls the lab."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

import fusewise
from fusewise.lab.interruption import interruptible
from fusewise.lab.render import printable
from fusewise.lab.targets import BUILT_IN

from . import _build, _code, _completion, _records, _tune
from ._options import Folder, names

EXIT_CODES = """\b
Exit codes:
  0    done; a provider that is missing, wrong or failed is a row with its reason
  1    it could not run, or no provider could be measured (the message says why)
  2    the command line is wrong
  130  interrupted; the rows measured so far are on disk
"""


class Verbs(click.Group):
    """Handles in the same way for every command: an interruption, by Ctrl-C, SIGTERM or SIGHUP, and an option given
    twice, of which click would take the last.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, verb, rest = super().resolve_command(ctx, args)
        if verb is not None and not ctx.resilient_parsing:
            inner = click.Context(verb, info_name=name, parent=ctx)
            *_, given = verb.make_parser(inner).parse_args(list(rest))
            for option in given:
                once = isinstance(option, click.Option) and not option.multiple and not option.is_flag
                if once and (times := given.count(option)) > 1:
                    raise click.UsageError(
                        f"{name}: {option.opts[0]} must be given once, got it {times} times; --help says if one takes several",
                        inner,
                    )
        return name, verb, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with interruptible():
                return super().invoke(ctx)
        except click.ClickException as error:  # may contain text of a user's exception
            error.message = printable(error.message)  # type: ignore[misc]
            raise
        except KeyboardInterrupt as interruption:
            click.echo(f"interrupted{interruption}", err=True)
            sys.exit(130)
        except OSError as error:
            if error.errno == errno.EPIPE:  # a reader that has seen enough, such as `| head`, needs no message
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for stream in (sys.stdout, sys.stderr):  # which Python flushes at exit
                    os.dup2(nowhere, stream.fileno())
            elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                click.echo(
                    f"Error: what is to be printed must find room, got {error}; print it somewhere else", err=True
                )
            else:
                raise
            sys.exit(2)  # for `compare`, 1 would be a result


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(fusewise.__version__, prog_name="fusewise")
def cli() -> None:
    """Fused kernels for PyTorch, and the evidence that they are worth it."""


def _rounds(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    low, _colon, high = value.partition(":")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not MIN:MAX or a number") from None


@cli.command(
    help=f"""Compare every provider of TARGET on this machine.

    Each provider, an implementation such as eager or torch.compile, is checked against float64, timed, and compared with
    the limits of this machine.

    TARGET is {", ".join(BUILT_IN)}, one of their presets, or a function of yours: my_file.py:my_function or
    my.module:my_function, with an --input for each argument.
    """,
    epilog="""\b
Examples:
  fusewise study rope
  fusewise study rope --preset rope-models --out runs/models
  fusewise study rope --case llama-3-8b-train --providers torch.compile,fusewise-cpu --pass bwd
  fusewise study gelu --preset gelu-sizes
  fusewise study my_file.py:my_function --input "x=bf16[4096,4096]" --input "eps=1e-6"
  fusewise study rope --preset rope-seqlen --append-rows benchmarks/baselines/h200.jsonl
  fusewise study rope --preset rope-models --out runs/models --resume
  torchrun --nproc-per-node 8 -m fusewise study rope --preset rope-models --out runs/models
  fusewise study rope --list
  fusewise study --list

"""
    + EXIT_CODES,
)
@click.argument("target", required=False, metavar="TARGET", shell_complete=_completion.target)
@click.option(
    "--input", "inputs", multiple=True, help='An argument of a function: "x=bf16[4096,4096]"; may be repeated.'
)
@click.option(
    "--preset", shell_complete=_completion.preset, help="A named set of cases. Default: the target's -quick one."
)
@click.option(
    "--case", "cases", multiple=True, shell_complete=_completion.case, help="A single case by name; may be repeated."
)
@click.option(
    "--providers",
    callback=names,
    shell_complete=_completion.provider,
    help="Comma-separated names, or module:attribute. Default: all available.",
)
@click.option("--pass", "passes", help="fwd, bwd, fwd+bwd, or both (fwd and bwd apart). Default: the case's own.")
@click.option(
    "--dtype",
    "dtypes",
    callback=names,
    help="Comma-separated: fp32, bf16, fp16, tf32 (float32 with matmuls in tf32; on a GPU). Default: the case's own.",
)
@click.option("--device", help="cpu or cuda[:index]. Default: the GPU if there is one.")
@click.option("--out", type=Folder(), help="Run directory. Default: fusewise-runs/….")
@click.option("--rounds", callback=_rounds, metavar="MIN:MAX", help="Rounds of each comparison. Default: 5:30.")
@click.option("--time-limit", type=click.FloatRange(min=0), help="Seconds for the whole study; at least MIN rounds.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Seconds after which a provider times out.",
)
@click.option(
    "--memory-limit", type=click.FloatRange(min=0.01), help="GiB of memory a provider may use. Default: 4/5 of all."
)
@click.option("--warm", is_flag=True, help="Measure with a warm cache instead of a cold one.")
@click.option("--code/--no-code", default=True, help="Also capture code and memory traffic. Default: yes.")
@click.option("--resume", is_flag=True, help="Resume the interrupted run in --out.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the inputs and of the order of rounds.")
@click.option(
    "--append-rows", type=click.Path(dir_okay=False, path_type=Path), help="Add the rows to this JSON-lines file."
)
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON instead of a table.")
@click.option(
    "--list", "list_cases", is_flag=True, help="List presets and cases (without TARGET: all), measure nothing."
)
def study(
    target: str | None,
    inputs: tuple[str, ...],
    preset: str | None,
    cases: tuple[str, ...],
    providers: list[str] | None,
    passes: str | None,
    dtypes: list[str] | None,
    device: str | None,
    out: Path | None,
    rounds: tuple[int, int] | None,
    time_limit: float | None,
    timeout: float,
    memory_limit: float | None,
    warm: bool,
    code: bool,
    resume: bool,
    seed: int,
    append_rows: Path | None,
    as_json: bool,
    list_cases: bool,
) -> None:
    from fusewise.lab import commands, plan, ranks

    if dtypes == []:
        raise click.UsageError(
            "study: dtype must be one of fp32, bf16, fp16, got none; leave it out for the case's own"
        )
    if list_cases:
        try:
            listing = commands.case_listing(target, inputs, preset, cases)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        click.echo(json.dumps(listing) if as_json else commands.case_text(listing))
        return
    if target is None:
        raise click.UsageError("study: a target must be given, got none; try `fusewise study rope`, or --list for all")
    request = plan.Request(
        target=target,
        inputs=inputs,
        preset=preset,
        cases=cases,
        providers=providers,
        passes=passes,
        dtypes=dtypes or (),
        device=device,
        out=out,
        rounds=rounds,
        time_limit=time_limit,
        timeout=timeout,
        memory_limit=memory_limit,
        warm=warm,
        seed=seed,
    )
    if resume and out is None:
        raise click.UsageError("study: --resume must come with --out, the run to go on with, got none; add --out")
    try:
        options = plan.options(request, plan.run_directory(request))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        rank = ranks.from_environment()
        done = (
            commands.run_shared(rank, options, append_rows, resume, code)
            if rank
            else commands.run(options, append_rows, resume, code)
        )
    except ValueError as error:  # the directory belongs to another run
        raise click.ClickException(str(error)) from None
    except BrokenPipeError:  # of what is printed
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "make room and add --resume" if full else "choose another --out"
        raise click.ClickException(f"study: the run directory must be writable, got {error}; {fix}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"; the rows measured so far are in {options.out}; continue with --resume") from None
    if done is None:  # a rank whose rows rank 0 reports
        return
    record, report = done
    if as_json:
        click.echo(json.dumps([row.to_json() for row in record.rows]))
    else:
        commands.show(record)
    click.echo(f"report: {report}", err=as_json)
    if not commands.measured(record):
        raise click.ClickException(
            "study: a provider must be right and have a time, got none; the rows have the reasons"
        )


@cli.command(
    epilog="""\b
Examples:
  fusewise providers
  fusewise providers --device cpu --json | jq '.[] | select(.state == "missing")'

\b
Exit codes:
  0  they are listed, whatever is missing
  2  the command line is wrong
"""
)
@click.option("--device", help="cpu or cuda[:index]. Default: the GPU if there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def providers(device: str | None, as_json: bool) -> None:
    """List the providers, their versions, and what is missing."""
    from fusewise.lab import commands, plan

    try:
        found = commands.provider_states(plan.device(device, "providers"))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(json.dumps(found))
    else:
        commands.show_providers(found)


for verb in (*_records.VERBS, *_code.VERBS, *_build.VERBS, *_tune.VERBS):
    cli.add_command(verb)
